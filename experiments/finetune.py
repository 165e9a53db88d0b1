"""Fine-tunes a language model privately, weight-tied or untied, and leaves a complete run folder.

Without a file or a hub:

    python experiments/finetune.py

On SST-2:

    python experiments/finetune.py --task sst2 --data-dir ../shared/data --model MODEL_DIR_OR_HUB_NAME \
        --no-tie-embeddings --engine ghost --epsilon 3 --out runs/a
"""

from wtdp_jax import cli
from wtdp_jax.config import TrainConfig


def main() -> None:
    """Trains with the settings on the command line."""
    config = cli.parse(TrainConfig)
    # Imported late, so that --help and bad settings answer at once.
    from wtdp_jax import train

    with cli.one_line_errors(ValueError, OSError):
        prepared = train.prepare(config)
    with cli.one_line_errors(OSError, FloatingPointError):
        print(train.run(*prepared).describe())


if __name__ == "__main__":
    main()
