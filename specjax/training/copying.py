"""A layer that starts by copying: it looks for where the present token stood before, and says what followed.

Texts repeat themselves, and attention takes many of them to find out how to use that (induction heads,
arXiv 2209.11895). EAGLE-3's inputs make it one layer's work: the state of a token, where it holds the token's
own embedding, lies beside the embedding of the next one.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Key

from specjax.models.llama import LlamaConfig
from specjax.types import Params

# How far above all else attention scores the same token, and how loud a copy is: what follows is to be right
# in a text of hundreds of tokens, and to be a hint where the token stood there before by chance.
SHARPNESS, LOUDNESS = 2.5, 0.12
# How much of the other states is handed on beside it.
OTHERS = 0.5


def start_copying(
    fc: Float[Array, "H F"], block: Params, layer: LlamaConfig, first: int, key: Key[Array, ""]
) -> tuple[Float[Array, "H F"], Params]:
    """First weights of a fusion and a layer, such as make `block` copy.

    The states hold the embedding of their own token, every number of about the size 1, from place `first`
    on. The layer reads the next token's embedding and the fused state, both normalised, side by side.
    """
    hidden, head_dim = layer.hidden_size, layer.head_dim
    num_heads, num_kv_heads = layer.num_heads, layer.num_kv_heads
    keys = jax.random.split(key, 3)
    # Turned, or the head would find the present token likely to come again.
    turn = jax.random.orthogonal(keys[0], hidden)
    fc = (OTHERS * fc).at[:, first : first + hidden].add(turn / 2)

    # The slower half of the rotations: distance changes little there. One projection for each head of keys.
    quarter, half = head_dim // 4, head_dim // 2
    slow = jnp.concatenate((jnp.arange(quarter, half), jnp.arange(half + quarter, head_dim)))
    alike = SHARPNESS * jax.random.normal(keys[1], (num_kv_heads, len(slow), hidden)) / hidden**0.5
    told = jax.random.normal(keys[2], (num_kv_heads, head_dim, hidden)) / hidden**0.5
    nothing = jnp.zeros_like(alike)
    by_next = jnp.concatenate((alike, nothing), axis=-1)
    by_state = jnp.concatenate((nothing, alike @ turn.T), axis=-1)

    attention = block["self_attn"]
    weight = attention["qkv_proj"]["weight"]
    queries, own_keys, values = jnp.split(
        weight.reshape(-1, head_dim, weight.shape[-1]), (num_heads, num_heads + num_kv_heads)
    )
    of_query = jnp.arange(num_heads) // (num_heads // num_kv_heads)
    queries = queries.at[:, slow].set(by_next[of_query])
    own_keys = own_keys.at[:, slow].set(by_state)
    values = jnp.concatenate((told, jnp.zeros_like(told)), axis=-1)
    qkv = jnp.concatenate((queries, own_keys, values)).reshape(weight.shape)
    out = LOUDNESS * told[of_query].reshape(-1, hidden).T
    attention = attention | {
        "qkv_proj": attention["qkv_proj"] | {"weight": qkv.astype(weight.dtype)},
        "o_proj": attention["o_proj"] | {"weight": out.astype(weight.dtype)},
    }
    return fc, block | {"self_attn": attention}
