"""What a model's config.json says, checked and typed: sizes and switches of one decoder.

Reads the forms that transformers 4 (``rope_theta``, ``rope_scaling``, ``torch_dtype``) and
transformers 5 (``rope_parameters``, ``dtype``) write. A key that would change the function and that
we do not compute is a ModelError, never ignored. Which keys a family has is said in ``models/``.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from shared.errors import ModelError

DEFAULT_ROPE_THETA = 10_000.0
DEFAULT_RMS_NORM_EPS = 1e-6

MAX_COUNT = (1 << 31) - 1
MAX_LAYERS = 10_000
MAX_NUMBER = 1e99
"""A damaged config.json says more, and would take all memory before any tensor is missed."""

RopeKind = Literal["default", "linear", "llama3", "yarn"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rope:
    """Rotary position embedding (Su et al. 2021, RoFormer) and how its frequencies are stretched.

    original_len: context length before stretching; only llama3 and yarn read it.
    """

    theta: float = DEFAULT_ROPE_THETA
    kind: RopeKind = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_len: int = 0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 1.0
    truncate: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """One decoder-only model.

    windows: per layer, how many positions a token sees, itself included; None = all earlier ones.
    dtype: the dtype the folder names for its weights, '' if it names none.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: Rope
    max_position_embeddings: int
    tie_word_embeddings: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    windows: tuple[int | None, ...]
    dtype: str

    @property
    def group_size(self) -> int:
        """Query heads per key/value head."""
        return self.num_heads // self.num_kv_heads

    @property
    def longest_len(self) -> int:
        """Most tokens that ``max_model_len`` may be raised to."""
        if self.rope.kind in ("linear", "yarn"):
            # Some folders give the length before stretching, some after; the larger one is harmless
            # as a limit because it is only reached when the operator asks for it.
            return int(self.max_position_embeddings * self.rope.factor)
        return self.max_position_embeddings

    def canonical(self) -> str:
        """The same text for the same function, whatever form config.json had."""
        return json.dumps(dataclasses.asdict(self), sort_keys=True)


class ConfigReader:
    """Typed access to the keys of one config.json; every complaint names file and key."""

    def __init__(self, values: Mapping[str, Any], path: Path | str) -> None:
        self.values = values
        self.path = path

    def error(self, text: str) -> ModelError:
        return ModelError(f"{self.path}: {text}")

    def has(self, key: str) -> bool:
        """Whether the key is there and not null."""
        return self.values.get(key) is not None

    def _value(self, key: str, default: Any) -> Any:
        """Return what a key has, if it is missing or null its default; None = it must be there."""
        value = self.values.get(key)
        if value is None and default is None:
            raise self.error(f"{key} is missing")
        return default if value is None else value

    def count(self, key: str, default: int | None = None, *, most: int = MAX_COUNT) -> int:
        """Return a positive integer; a missing or null key is an error if there is no default."""
        value = self._value(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most:
            raise self.error(f"{key} must be a positive integer up to {most}, not {value!r}")
        return value

    def num_layers(self) -> int:
        return self.count("num_hidden_layers", most=MAX_LAYERS)

    def window(self) -> int | None:
        """Return ``sliding_window``; null is none, a missing key 4,096."""
        if "sliding_window" in self.values and not self.has("sliding_window"):
            return None
        return self.count("sliding_window", 4096)

    def index(self, key: str, default: int) -> int:
        """Return an integer >= 0; 8192.0 is one."""
        value = self._value(key, default)
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= MAX_COUNT:
            raise self.error(f"{key} must be an integer >= 0, not {value!r}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """Return a number > 0."""
        value = self._value(key, default)
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise self.error(f"{key} must be a number, not {value!r}")
        if not 1 / MAX_NUMBER <= value <= MAX_NUMBER:
            raise self.error(f"{key} must be greater than 0, up to 1e99, not {value!r}")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        value = self._value(key, default)
        if not isinstance(value, bool):
            raise self.error(f"{key} must be true or false, not {value!r}")
        return value

    def section(self, key: str) -> ConfigReader | None:
        """Return a reader of a nested object, or None if the key is missing, null or empty."""
        value = self.values.get(key)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.error(f"{key} must be an object, not {value!r}")
        return ConfigReader(value, f"{self.path}: {key}") if value else None


def read_common(
    reader: ConfigReader,
    *,
    architecture: str,
    max_len: int,
    num_kv_heads: int | None = None,
    head_dim: int | None = None,
    qkv_bias: bool = False,
    o_bias: bool = False,
    mlp_bias: bool = False,
    qk_norm: bool = False,
    windows: tuple[int | None, ...] | None = None,
) -> ModelConfig:
    """Read what all families share; the arguments are what a family decides itself.

    max_len, num_kv_heads, head_dim: what transformers takes for this family where config.json says
    nothing; None = as many as heads, hidden / heads.
    windows: None = every layer sees all earlier positions.
    """
    _refuse_unsupported(reader)
    hidden_size = reader.count("hidden_size")
    num_heads = reader.count("num_attention_heads")
    num_layers = reader.num_layers()
    if num_kv_heads is None or "num_key_value_heads" in reader.values:  # null: as many as heads
        num_kv_heads = num_heads
    num_kv_heads = reader.count("num_key_value_heads", num_kv_heads)
    if num_heads % num_kv_heads:
        raise reader.error(
            f"num_attention_heads {num_heads} is no multiple of num_key_value_heads {num_kv_heads}"
        )
    if head_dim is None:
        head_dim = hidden_size // num_heads
    head_dim = reader.count("head_dim", head_dim)
    if head_dim % 2:
        raise reader.error(f"head_dim {head_dim} is odd: rotary embedding needs pairs")
    max_len = reader.count("max_position_embeddings", max_len)
    return ModelConfig(
        architecture=architecture,
        vocab_size=reader.count("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=reader.count("intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rms_norm_eps=reader.number("rms_norm_eps", DEFAULT_RMS_NORM_EPS),
        rope=read_rope(reader, max_len),
        max_position_embeddings=max_len,
        tie_word_embeddings=reader.flag("tie_word_embeddings", False),
        qkv_bias=qkv_bias,
        o_bias=o_bias,
        mlp_bias=mlp_bias,
        qk_norm=qk_norm,
        windows=windows if windows is not None else (None,) * num_layers,
        dtype=_read_dtype(reader),
    )


def _refuse_unsupported(reader: ConfigReader) -> None:
    if reader.has("quantization_config"):
        raise reader.error("quantization_config: quantised weights are not supported")
    activation = reader.values.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise reader.error(f"hidden_act {activation!r} is not supported (only silu)")


def _read_dtype(reader: ConfigReader) -> str:
    value = reader.values.get("dtype") or reader.values.get("torch_dtype") or ""
    if not isinstance(value, str):
        raise reader.error(f"dtype must be text, not {value!r}")
    return value.removeprefix("torch.")


def read_rope(reader: ConfigReader, max_len: int) -> Rope:
    """Read rotary parameters with the precedence of transformers 5.

    ``rope_scaling`` wins over ``rope_parameters``; a theta inside wins over the top-level one.
    """
    outer_theta = reader.number("rope_theta", DEFAULT_ROPE_THETA)
    if reader.values.get("partial_rotary_factor", 1.0) not in (None, 1, 1.0):
        raise reader.error("partial_rotary_factor other than 1 is not supported")
    inner = reader.section("rope_scaling") or reader.section("rope_parameters")
    if inner is None:
        return Rope(theta=outer_theta)
    if any(isinstance(value, dict) for value in inner.values.values()):
        raise inner.error("rotary parameters that differ between layer types are not supported")
    if inner.values.get("partial_rotary_factor", 1.0) not in (None, 1, 1.0):
        raise inner.error("partial_rotary_factor other than 1 is not supported")
    theta = inner.number("rope_theta", outer_theta)
    kind = inner.values.get("rope_type") or inner.values.get("type") or "default"
    # transformers lets a top-level value win here, unlike for theta.
    original_len = reader.index(
        "original_max_position_embeddings",
        inner.index("original_max_position_embeddings", max_len),
    )
    match kind:
        case "default":
            return Rope(theta=theta)
        case "linear":
            return Rope(theta=theta, kind="linear", factor=inner.number("factor"))
        case "llama3":
            low, high = inner.number("low_freq_factor"), inner.number("high_freq_factor")
            if high <= low:
                raise inner.error(f"high_freq_factor {high} must exceed low_freq_factor {low}")
            return Rope(
                theta=theta,
                kind="llama3",
                factor=inner.number("factor"),
                low_freq_factor=low,
                high_freq_factor=high,
                original_len=original_len,
            )
        case "yarn":
            return _read_yarn(inner, theta, original_len)
        case _:
            raise inner.error(
                f"rope_type {kind!r} is not supported (default, linear, llama3 and yarn are)"
            )


def _read_yarn(inner: ConfigReader, theta: float, original_len: int) -> Rope:
    for key in ("mscale", "mscale_all_dim"):
        if inner.has(key):
            raise inner.error(f"{key} is not supported")
    if not original_len or theta == 1:
        raise inner.error(
            f"rope_theta {theta:g} and original_max_position_embeddings {original_len} are no yarn"
        )
    factor = inner.number("factor")
    # Peng et al. 2023, YaRN, section 3.4: attention temperature 0.1 ln(s) + 1.
    temperature = 0.1 * math.log(factor) + 1.0 if factor > 1 else 1.0
    return Rope(
        theta=theta,
        kind="yarn",
        factor=factor,
        original_len=original_len,
        beta_fast=inner.number("beta_fast", 32.0),
        beta_slow=inner.number("beta_slow", 1.0),
        attention_factor=inner.number("attention_factor", temperature),
        truncate=inner.flag("truncate", True),
    )
