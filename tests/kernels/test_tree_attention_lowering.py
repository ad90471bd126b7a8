"""Whether the Pallas kernels are legal on devices that are not there: lowering, and compiling (`aot`)."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl
from jax.experimental import topologies
from jax.experimental.pallas import mosaic_gpu as plgpu

from specjax.kernels.tree_attention import api, pallas_gpu, pallas_tpu
from tests.kernels.tree_attention_cases import Shape


def abstract(shape: Shape, dtype: Any, sharding: Any = None) -> tuple[jax.ShapeDtypeStruct, ...]:
    """The arguments of tree attention without their contents."""
    batch, num_nodes, num_scratch, num_kv_heads, group, head_dim, num_slots = shape
    slots = (batch * num_kv_heads, num_slots, head_dim)
    make = functools.partial(jax.ShapeDtypeStruct, sharding=sharding)
    return (
        make((batch, num_nodes, num_kv_heads * group, head_dim), dtype),
        make(slots, dtype),
        make(slots, dtype),
        make((batch,), jnp.int32),
        make((batch, num_nodes, num_scratch), jnp.bool_),
    )


def on_device(kind: str, platform: str) -> Any:
    """A context in which jax takes the target to be a device of that kind."""
    device = jax.sharding.AbstractDevice(kind, 1, platform)
    return jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((1,), ("x",), abstract_device=device))


def lower(kind: str, platform: str, function: Callable[..., jax.Array], *arguments: Any) -> str:
    with on_device(kind, platform):
        return jax.jit(function).trace(*arguments).lower(lowering_platforms=(platform,)).as_text()


lower_tpu = functools.partial(lower, "TPU v5 lite", "tpu")
lower_gpu = functools.partial(lower, "NVIDIA H100 80GB HBM3", "cuda")


def copy_in_blocks(rows: int) -> Callable[[jax.Array], jax.Array]:
    """A kernel that copies; blocks of 8 rows are legal, of 60 are not."""

    def copy(source: Any, target: Any) -> None:
        target[...] = source[...]

    block = pl.BlockSpec((rows, 128), lambda i: (i, 0))
    return lambda x: pl.pallas_call(
        copy, out_shape=x, grid=(pl.cdiv(x.shape[0], rows),), in_specs=[block], out_specs=block
    )(x)


def test_lowering_tells_legal_kernels_from_others() -> None:
    x = jax.ShapeDtypeStruct((256, 128), jnp.float32)
    assert "tpu_custom_call" in lower_tpu(copy_in_blocks(8), x)
    with pytest.raises(ValueError, match="divisible by 8"):
        lower_tpu(copy_in_blocks(60), x)


LEGAL_SHAPES = [
    Shape(1, 1, 1, 3, 3, 64, 2048),
    Shape(1, 1, 1, 8, 4, 128, 131072),
    Shape(1, 64, 64, 8, 4, 128, 8192),
    Shape(2, 5, 7, 2, 4, 96, 700),
    Shape(3, 4, 4, 2, 1, 64, 40),
    Shape(1, 128, 1024, 8, 4, 128, 4096),
    Shape(1, 128, 128, 1, 32, 256, 131072),
]


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("shape", LEGAL_SHAPES)
def test_lowers_for_tpus(shape: Shape, dtype: Any) -> None:
    run = functools.partial(api.tree_attention, implementation="pallas_tpu")
    assert lower_tpu(run, *abstract(shape, dtype)).count("tpu_custom_call") == 1


def test_lowering_for_gpus_tells_legal_kernels_from_others() -> None:
    def copy_line(source: Any, target: Any) -> None:
        target[...] = source[...]

    x = jax.ShapeDtypeStruct((128,), jnp.float32)
    assert "mosaic_gpu" in lower_gpu(plgpu.kernel(copy_line, out_type=x), x)
    odd = abstract(Shape(1, 1, 1, 3, 3, 64, 300), jnp.bfloat16)
    with pytest.raises(ValueError, match="multiple of its tiling"):
        lower_gpu(pallas_gpu.tree_attention, *odd)
    assert not pallas_gpu.supports(*odd[:3])
    assert not pallas_gpu.supports(*abstract(Shape(1, 1, 1, 3, 3, 64, 304), jnp.float32)[:3])


@pytest.mark.parametrize("shape", LEGAL_SHAPES)
def test_lowers_for_hopper(shape: Shape) -> None:
    arguments = abstract(shape._replace(num_slots=-(-shape.num_slots // 8) * 8), jnp.bfloat16)
    assert pallas_gpu.supports(*arguments[:3])
    run = functools.partial(api.tree_attention, implementation="pallas_gpu")
    assert "mosaic_gpu" in lower_gpu(run, *arguments)


def test_on_a_cpu_nothing_is_chosen_that_needs_another_device() -> None:
    arguments = abstract(Shape(1, 64, 64, 2, 2, 64, 256), jnp.bfloat16)
    text = jax.jit(api.tree_attention).lower(*arguments).as_text()
    assert "tpu_custom_call" not in text and "mosaic_gpu" not in text
    override = functools.partial(api.tree_attention, implementation="cpu")
    assert "specjax_tree_attention" in jax.jit(override).lower(*arguments).as_text()


@pytest.mark.parametrize("kernel", [pallas_tpu.tree_attention, pallas_gpu.tree_attention])
def test_no_array_outside_the_kernel_grows_with_the_cache(kernel: Callable[..., jax.Array]) -> None:
    def sizes(num_slots: int) -> list[int]:
        arguments = abstract(Shape(1, 8, 8, 1, 2, 64, num_slots), jnp.bfloat16)
        equations = jax.make_jaxpr(kernel)(*arguments).eqns
        return [out.aval.size for equation in equations for out in equation.outvars]

    assert sizes(1 << 17) == sizes(1 << 16)


@pytest.fixture(scope="module")
def v5e() -> Any:
    """A TPU v5e that is not there, for the compiler of `specjax[aot]`."""
    pytest.importorskip("libtpu", reason="the TPU compiler is not installed: pip install 'specjax[aot]'")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TPU_SKIP_MDS_QUERY", "1")
        return topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x2").devices[0]


# What the compiler asks of a GPU that is not there.
H100 = """
gpu_device_info {
  threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152
  shared_memory_per_core: 233472 threads_per_core_limit: 2048 core_count: 132 fpus_per_core: 128
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: 3352320000000 l2_cache_size: 52428800 clock_rate_ghz: 1.98
  device_memory_size: 84978434048 shared_memory_per_block_optin: 232448
  cuda_compute_capability { major: 9 minor: 0 feature_extension: 2 }
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 8 patch: 0 }
device_description_str: "NVIDIA H100 80GB HBM3"
"""


@pytest.fixture(scope="module")
def h100() -> Any:
    """An H100 that is not there, for the compiler of `specjax[aot]`."""
    reason = "the CUDA compiler is not installed: pip install 'specjax[aot]'"
    pytest.importorskip("jax_plugins.xla_cuda12", reason=reason)
    topology = topologies.get_topology_desc("", "cuda", target_config=H100, topology="1x1x1")
    return topology.devices[0]


def compile_for(device: Any, kernel: Callable[..., jax.Array], shape: Shape, dtype: Any) -> Any:
    """The kernel, compiled for a device that is not there."""
    arguments = abstract(shape, dtype, jax.sharding.SingleDeviceSharding(device))
    platform = "tpu" if device.platform == "tpu" else "cuda"
    with on_device(device.device_kind, platform):
        return jax.jit(kernel).lower(*arguments).compile()


def assert_scores_are_not_kept(compiled: Any, shape: Shape) -> None:
    """Temporaries are well below the scores of all nodes and slots in float32."""
    score_bytes = 4 * shape.batch * shape.num_kv_heads * shape.group * shape.num_nodes * shape.num_slots
    assert compiled.memory_analysis().temp_size_in_bytes < max(score_bytes / 2, 1 << 20)


@pytest.mark.aot
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("shape", LEGAL_SHAPES)
def test_compiles_for_a_v5e_without_one(shape: Shape, dtype: Any, v5e: Any) -> None:
    assert_scores_are_not_kept(compile_for(v5e, pallas_tpu.tree_attention, shape, dtype), shape)


@pytest.mark.aot
def test_the_tpu_compiler_refuses_what_does_not_fit(v5e: Any) -> None:
    x = jax.ShapeDtypeStruct((1 << 17, 128), jnp.float32, sharding=jax.sharding.SingleDeviceSharding(v5e))
    with on_device(v5e.device_kind, "tpu"), pytest.raises(jax.errors.JaxRuntimeError, match="memory"):
        jax.jit(copy_in_blocks(1 << 17)).lower(x).compile()


@pytest.mark.aot
@pytest.mark.parametrize("shape", LEGAL_SHAPES)
def test_compiles_for_an_h100_without_one(shape: Shape, h100: Any) -> None:
    shape = shape._replace(num_slots=-(-shape.num_slots // 8) * 8)
    assert_scores_are_not_kept(compile_for(h100, pallas_gpu.tree_attention, shape, jnp.bfloat16), shape)
