"""Draw docs/images/healthy.svg, metrics of two runs: `python scripts/healthy_picture.py GOOD_RUN BAD_RUN`."""

import json
import sys
from pathlib import Path

import matplotlib as mpl
import matplotlib.pyplot as plt

TARGET = Path(__file__).resolve().parents[1] / "docs" / "images" / "healthy.svg"
PANELS = (
    ("reward", "reward", "linear"),
    ("entropy_mean", "entropy, nats", "linear"),
    ("kl_old", "KL from the old policy, nats", "log"),
    ("groups_without_signal", "trees without signal, of 16", "linear"),
)


def main() -> None:
    """Draw one panel per metric with both runs."""
    mpl.rcParams |= {"svg.hashsalt": "healthy", "font.size": 9}
    figure, axes = plt.subplots(1, len(PANELS), figsize=(11, 2.6), constrained_layout=True)
    for path, label, color in zip(sys.argv[1:], ("healthy", "learning rate too high"), ("#2a7", "#c33"), strict=True):
        rows = [json.loads(line) for line in (Path(path) / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
        for axis, (name, title, scale) in zip(axes, PANELS, strict=True):
            axis.plot([row["step"] for row in rows], [row[name] for row in rows], color=color, label=label)
            axis.set(title=title, xlabel="step", yscale=scale)
    axes[0].legend()
    figure.savefig(TARGET, metadata={"Date": None})


if __name__ == "__main__":
    main()
