"""A verifiers environment for tests: the model guesses a number, and the user answers "higher" or "lower"."""

import verifiers.v1 as vf

FIRST = "Guess my number."


class GuessData(vf.TaskData):
    number: int


class GuessTask(vf.Task[GuessData, vf.State, vf.TaskConfig]):
    @vf.reward(weight=1.0)
    async def found(self, trace) -> float:
        return float(trace.last_reply.strip() == str(self.data.number))

    @vf.reward(weight=-0.125)
    async def guesses(self, trace) -> float:
        return float(trace.num_turns)


class GuessConfig(vf.TasksetConfig):
    size: int = 32


class GuessTaskset(vf.Taskset[GuessTask, GuessConfig]):
    def load(self):
        for index in range(self.config.size):
            yield GuessTask(GuessData(prompt=FIRST, system_prompt="One number a turn.", number=index % 8))


class GuessEnvConfig(vf.EnvConfig):
    player: vf.AgentConfig = vf.AgentConfig()


class GuessEnv(vf.Env[GuessEnvConfig]):
    async def run(self, task, agents):
        async with agents.player.interaction(task) as interaction:
            segment = await interaction.turn()
            while not segment.terminated and (guess := segment.last_reply.strip()) != str(task.data.number):
                low = guess.isdecimal() and int(guess) < task.data.number
                segment = await interaction.turn("higher" if low else "lower")


__all__ = ["GuessEnv", "GuessTaskset"]
