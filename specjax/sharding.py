"""All devices of all processes as one axis: every device has the weights and a share of each batch."""

from __future__ import annotations

import os
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from specjax.errors import ConfigError

DATA = "data"  # the axis that batches are divided over


def join_processes() -> None:
    """Join the other processes of a run, where JAX_COORDINATOR_ADDRESS says that there are some.

    JAX_NUM_PROCESSES and JAX_PROCESS_ID go with it, unless a cluster says them. Before any use of a device.
    """
    if "JAX_COORDINATOR_ADDRESS" not in os.environ:
        return
    count, own = os.environ.get("JAX_NUM_PROCESSES"), os.environ.get("JAX_PROCESS_ID")
    jax.distributed.initialize(
        num_processes=None if count is None else int(count), process_id=None if own is None else int(own)
    )


def make_mesh() -> Mesh:
    """A mesh of all devices, its one axis `DATA`."""
    return Mesh(np.asarray(jax.devices()), (DATA,))


def replicate(tree: Any, mesh: Mesh) -> Any:
    """The same values on every device; all processes have to give the same."""
    whole = NamedSharding(mesh, PartitionSpec())
    if jax.process_count() > 1:  # an array that is on one device already cannot go to other processes'
        tree = jax.tree.map(np.asarray, tree)
    return jax.device_put(tree, whole)


def divide(tree: Any, mesh: Mesh) -> Any:
    """Arrays whose rows are divided over the devices, from the rows that this process holds."""
    by_row = NamedSharding(mesh, PartitionSpec(DATA))
    return jax.tree.map(lambda rows: jax.make_array_from_process_local_data(by_row, rows), tree)


def on_one_device(tree: Any) -> Any:
    """What every device has, as this process's first one has it, without a copy."""
    return jax.tree.map(lambda leaf: leaf.addressable_data(0), tree)


def rows_of_process(batch_size: int) -> int:
    """The rows of a batch that each process holds; ConfigError where the devices cannot share them evenly."""
    if batch_size % jax.device_count():
        raise ConfigError(
            f"batch_size is {batch_size} and there are {jax.device_count()} devices: give a multiple"
        )
    return batch_size // jax.process_count()
