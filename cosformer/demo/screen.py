"""What one sees while two runs go on: a bar on a terminal, a line for every evaluation."""

from cosformer.demo.learning import COMPARED, Pair
from cosformer.records import Row
from cosformer.report import NAMES
from cosformer.training import judged_by


class Screen:
    """Shows the rows of a pair as they come."""

    def __init__(self, pair: Pair) -> None:
        from tqdm import tqdm

        self._last = NAMES[COMPARED[-1]]
        self._judged = f"valid_{judged_by(pair.task.facts)}"
        self._shown: dict[str, dict[str, float]] = {"train_loss": {}, self._judged: {}}
        self._done: dict[str, int] = {}
        # disable=None: a bar on a terminal, silence elsewhere
        total = sum(config.budget.steps for config in pair.configs.values())
        self._bar = tqdm(total=total, unit="step", disable=None, leave=False)

    def close(self) -> None:
        self._bar.close()

    @property
    def done(self) -> int:
        """Steps of the run that is behind."""
        return min(self._done.values()) if len(self._done) == len(COMPARED) else 0

    def show(self, row: Row) -> None:
        if row.what not in self._shown:
            return
        name, values = NAMES[row.config["candidate"]], self._shown[row.what]
        values[name] = row.value
        if row.what == "train_loss":
            self._bar.update(row.config["step"] - self._done.get(name, 0))
            self._done[name] = row.config["step"]
            self._bar.set_postfix_str(f"loss {_spelt(values)}")
        elif name == self._last:
            quantity = self._judged.removeprefix("valid_")
            at = f"{row.config['step']:>6,} of {row.config['steps']:,} steps"
            self._bar.write(f"{at}  validation {quantity}: {_spelt(values)}")


def _spelt(values: dict[str, float]) -> str:
    return ", ".join(f"{name} {value:.3f}" for name, value in values.items())
