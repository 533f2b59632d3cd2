"""The reward that an environment gives itself."""

from dataclasses import dataclass

from arpo_megatron.rewards.base import Response, ResponseGroup, Score
from arpo_megatron.tasks.environments.base import CORRECT


@dataclass(frozen=True, slots=True)
class EnvironmentReward:
    """The sum of all parts of the reward over the actions of a trajectory."""

    @property
    def needs_judge(self) -> bool:
        """Return False: the environment itself judges."""
        return False

    def score_group(self, group: ResponseGroup) -> list[Score]:
        """Add up the parts. The accuracy is the part `correct`, else the reward, within [0, 1]."""
        return [_score(response) for response in group.responses]


def _score(response: Response) -> Score:
    reward = float(sum(response.rewards.values()))
    accuracy = min(1.0, max(0.0, response.rewards.get(CORRECT, reward)))
    last = response.text if response.last_turn is None else response.last_turn
    return Score(reward, accuracy, format_ok=True, terms=dict(response.rewards), answer=last)
