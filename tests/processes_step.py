"""One step of a learner that several processes share; `test_hosts.py` starts each of them.

    python processes_step.py METHOD FILE COORDINATOR PROCESSES PROCESS_ID

Each has two devices, and rows of its own; process 0 writes the new networks and the metrics.
"""

import sys

import jax
import numpy as np

from copc_jax import distributed
from copc_jax.settings import DistributedConfig


def main(method: str, file: str, coordinator: str, processes: int, process_id: int) -> None:
    jax.config.update("jax_num_cpu_devices", 2)
    jax.config.update("jax_disable_most_optimizations", True)
    config = DistributedConfig(coordinator, processes, process_id)
    with distributed.start(config) as group, jax.numpy_dtype_promotion("standard"):
        # It uses devices when it is imported.
        import test_learner

        learner = test_learner.learner_of(method, mesh=(processes, 2))
        whole = test_learner.batch_for(method)
        rows = np.arange(test_learner.ROWS).reshape(2, processes, -1)[:, process_id].ravel()
        mine = jax.tree.map(lambda x: x[rows], whole)
        batch = group.place(mine, 2, learner.batch_sharding)
        np.testing.assert_array_equal(group.whole(batch.token_ids), whole.token_ids)
        np.testing.assert_array_equal(group.own(batch.token_ids, 2), mine.token_ids)
        state, metrics = learner.step(test_learner.start(learner), batch)
        networks = group.whole({"actor": state.actor, "critic": state.critic})
        metrics = jax.device_get(metrics)
        totals = {name: float(total) for name, (total, _) in metrics.items()}
        assert group.gather("the metrics", totals) == [totals] * processes
        if group.first:
            np.savez(file, *jax.tree.leaves((networks, metrics)))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]), int(sys.argv[5]))
