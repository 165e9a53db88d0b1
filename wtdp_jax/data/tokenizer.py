"""Loading a tokenizer from a folder or the hub."""

from pathlib import Path

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from wtdp_jax.messages import printable


def load_tokenizer(folder_or_hub_name: str | Path) -> PreTrainedTokenizerBase:
    """Loads the tokenizer of a model folder or of a hub name.

    Raises:
      ValueError: in one line, if there is none.
    """
    try:
        return AutoTokenizer.from_pretrained(folder_or_hub_name, trust_remote_code=False)
    # Whatever a damaged file leads to; the tokenizers library raises plain Exceptions.
    except Exception as error:
        kind = "folder" if Path(folder_or_hub_name).is_dir() else "hub name (there is no such folder)"
        reason = printable(str(error).strip().partition("\n")[0]) or type(error).__name__
        raise ValueError(f"tokenizer cannot be loaded from {kind} '{folder_or_hub_name}': {reason}") from None
