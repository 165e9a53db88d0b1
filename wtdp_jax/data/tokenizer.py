"""Loading a tokenizer from a folder or the hub."""

from pathlib import Path

from transformers import AutoTokenizer, PreTrainedTokenizerBase


def load_tokenizer(folder_or_hub_name: str | Path) -> PreTrainedTokenizerBase:
    """Loads the tokenizer of a model folder or of a hub name.

    Raises:
      ValueError: in one line, if there is none.
    """
    try:
        return AutoTokenizer.from_pretrained(folder_or_hub_name)
    except (OSError, ValueError, KeyError) as error:
        kind = "folder" if Path(folder_or_hub_name).is_dir() else "hub name (there is no such folder)"
        reason = str(error).strip().partition("\n")[0]
        raise ValueError(f"tokenizer cannot be loaded from {kind} '{folder_or_hub_name}': {reason}") from None
