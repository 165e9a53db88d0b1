"""Rotary settings in a config.json: `rope_parameters`, or in older files `rope_theta` and `rope_scaling`."""

from typing import Any

from wtdp_jax.models.hf_family import Entries, check_supported, typed
from wtdp_jax.models.llama import LlamaConfig
from wtdp_jax.models.rotary import Llama3Scaling

_DEFAULT_THETA = 10000.0

_FACTORS = ("factor", "low_freq_factor", "high_freq_factor")

_KNOWN = (
    *("rope_type", "type", "rope_theta", "partial_rotary_factor", "original_max_position_embeddings"),
    *_FACTORS,
)


def rope_from_json(entries: Entries) -> tuple[float, Llama3Scaling | None]:
    """Reads the base of the rotary frequencies and their scaling, of the types "default" and "llama3".

    Args:
      entries: of a config.json, with `rope_parameters`, or `rope_theta` and `rope_scaling`, or neither.

    Raises:
      ValueError: if the rotation is of another type, not of all features, or not the same in all layers.
    """
    # As in transformers, the older entry comes first.
    source = "rope_scaling" if entries.get("rope_scaling") else "rope_parameters"
    rope = entries.get(source) or {}
    if not isinstance(rope, dict):
        raise ValueError(f"{source} in config.json must be an object, got {rope!r}")
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in ("default", "llama3"):
        raise ValueError(f"rope_type must be default or llama3, got {kind!r}")
    # Such as settings layer by layer.
    if unknown := rope.keys() - set(_KNOWN):
        raise ValueError(f"{source} must have no entries but {', '.join(_KNOWN)}, got {min(unknown)!r}")
    for place in (entries, rope):
        check_supported(place, {"partial_rotary_factor": (1.0, None)})
    check_supported(entries, {"original_max_position_embeddings": (None,)})
    theta = typed({"rope_theta": _DEFAULT_THETA, **entries, **rope}, "rope_theta", float)
    return theta, _scaling(rope, entries, source) if kind == "llama3" else None


def rope_to_json(config: LlamaConfig) -> dict[str, Any]:
    """Returns `rope_parameters`."""
    scaling = config.rope_scaling
    if scaling is None:
        return {"rope_type": "default", "rope_theta": config.rope_theta}
    return {
        "rope_type": "llama3",
        "rope_theta": config.rope_theta,
        **{name: getattr(scaling, name) for name in _FACTORS},
        "original_max_position_embeddings": scaling.original_n_positions,
    }


def _scaling(rope: Entries, entries: Entries, source: str) -> Llama3Scaling:
    factors = {name: typed(rope, name, float, within=source) for name in _FACTORS}
    longest = typed(entries, "max_position_embeddings", int)
    original = typed(rope, "original_max_position_embeddings", int, default=longest, within=source)
    return Llama3Scaling(**factors, original_n_positions=original)
