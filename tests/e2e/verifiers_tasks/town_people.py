"""A verifiers taskset for tests whose questions need a tool."""

import verifiers.v1 as vf

PEOPLE = {"Arl": 52, "Bex": 7}


class Register(vf.Toolset[vf.ToolsetConfig, vf.State]):
    TOOL_PREFIX = None

    @vf.tool
    async def people(self, town: str) -> str:
        """Return how many people live in a town."""
        return str(PEOPLE.get(town, "unknown"))


class TownData(vf.TaskData):
    answer: str


class TownTask(vf.Task[TownData, vf.State, vf.TaskConfig]):
    @classmethod
    def toolsets(cls, config):
        return [Register(vf.ToolsetConfig())]

    @vf.reward
    async def correct(self, trace) -> float:
        return float(self.data.answer in trace.last_reply)


class TownTaskset(vf.Taskset[TownTask, vf.TasksetConfig]):
    def load(self):
        for town, people in PEOPLE.items():
            yield TownTask(TownData(prompt=f"How many people live in {town}?", answer=str(people)))


__all__ = ["TownTaskset"]

if __name__ == "__main__":  # verifiers starts the tools so
    Register.run()
