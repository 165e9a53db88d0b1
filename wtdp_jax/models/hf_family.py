"""What tells one family of models from another in Hugging Face's form, and how its config.json is read."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from wtdp_jax.models.decoder import Decoder, DecoderConfig

Entries = Mapping[str, Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class TensorNames:
    """Hugging Face's names for a family's parameters, and how they are stored.

    Attributes:
      prefix: stands before all names but the head's; without it they are those of the bare model.
      modules: bare names by a module's path; those of blocks, under `h`, have {} in the layer's place.
      outputs_first: whether kernels are outputs x inputs, as a head always is; a Flax kernel is inputs x
        outputs.
      buffers: a regular expression of what else older exports keep among the weights, by bare name.
    """

    prefix: str
    modules: Mapping[str, str]
    outputs_first: bool
    buffers: str

    @property
    def embedding(self) -> str:
        """The embedding's bare name."""
        return f"{self.modules['wte']}.weight"

    def of(self, path: str, layers: int) -> list[str]:
        """Bare names for a leaf, one a layer if it is in the blocks, else one."""
        module, _, leaf = path.rpartition("/")
        name = f"{self.modules[module]}.{'bias' if leaf == 'bias' else 'weight'}"
        return [name.format(layer) for layer in range(layers)] if in_blocks(path) else [name]

    def is_turned(self, path: str) -> bool:
        """Whether a leaf is stored the other way round."""
        return path == "lm_head/kernel" or (self.outputs_first and path.endswith("/kernel"))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Family:
    """A family of models.

    Attributes:
      model_types: config.json's names for it.
      model: its module.
      config: its configuration.
      from_json: makes a configuration of the entries of a config.json; refuses what the model would not
        compute exactly.
      to_json: the entries that `from_json` reads back, but for those that `hf_config` writes for all.
      names: of its tensors.
    """

    model_types: tuple[str, ...]
    model: type[Decoder]
    config: type[DecoderConfig]
    from_json: Callable[[Entries], DecoderConfig]
    to_json: Callable[[Any], dict[str, Any]]
    names: TensorNames


def in_blocks(path: str) -> bool:
    """Whether a leaf is one of the blocks', stacked over layers."""
    return path.startswith("h/")


def check_supported(entries: Entries, supported: Mapping[str, tuple[Any, ...]]) -> None:
    """Demands of each option one of the values that the model computes; absent means the first.

    Raises:
      ValueError: if one has another value.
    """
    for name, values in supported.items():
        if entries.get(name, values[0]) not in values:
            allowed = " or ".join(repr(value) for value in values)
            raise ValueError(f"{name} must be {allowed}, got {entries[name]!r}")


def typed(entries: Entries, name: str, kind: type, default: Any = None, within: str = "config.json") -> Any:
    """The named entry, which must be of one kind; without a default it must be there.

    Args:
      entries: a decoded JSON object.
      name: the entry's.
      kind: int, float, bool or str.
      default: stands in for an absent entry.
      within: what the object is, for the message.

    Raises:
      ValueError: if it is missing or of another kind.
    """
    value = entries.get(name, default)
    # A bool is an int to Python, and JSON writes the float 1.0 as 1.
    if kind is float and type(value) is int and abs(value) < 2**1000:
        return float(value)
    if type(value) is not kind:
        found = repr(value) if name in entries else "nothing"
        raise ValueError(f"{name} in {within} must be {kind.__name__}, got {found}")
    return value
