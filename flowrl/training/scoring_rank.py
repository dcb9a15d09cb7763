"""One rank of a model that is sharded for scoring: `python -m flowrl.training.scoring_rank DESCRIPTOR PARENT`.

It answers its parent's questions until the parent closes the pipe. If the parent ends, this process ends too, even in
the middle of a collective.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import traceback
from multiprocessing.connection import Connection
from typing import Any

import torch

from flowrl.errors import ConfigError
from flowrl.machine.orphans import has_ended
from flowrl.training.engine.gang import Gang
from flowrl.training.engine.residence import Residence
from flowrl.training.engine.zero import sharded_loading
from flowrl.training.memory import SCORING_LIVE
from flowrl.training.model.row_layout import require_trees
from flowrl.training.model.value_model import ScalarModel
from flowrl.training.scoring_models import RankStart

PREFETCHED_ELEMENTS = 50_000_000


class Shard:
    """This rank's part of the model."""

    def __init__(self, start: RankStart) -> None:
        device = torch.device(start.device, 0) if start.device == "cuda" else torch.device("cpu")
        self.gang = Gang.meet_ranks(start.rank, start.size, start.address, device)
        import deepspeed

        config = {  # ZeRO-3 without an optimizer; small parameters are sharded too
            "train_micro_batch_size_per_gpu": 1,
            "bf16": {"enabled": start.load.dtype == "bfloat16"},
            "steps_per_print": None,
            "zero_optimization": {
                "stage": 3,
                "stage3_param_persistence_threshold": 0,
                "stage3_max_live_parameters": SCORING_LIVE,
                "stage3_max_reuse_distance": 0,
                "stage3_prefetch_bucket_size": PREFETCHED_ELEMENTS,
            },
        }
        with sharded_loading(config):
            model = start.load.load_model(tries=False)
        self._engine, *_ = deepspeed.initialize(model=model, config=config)
        self.model: Any = self._engine.module.eval()
        self._residence = Residence(self._engine, device)
        self._calls = 0
        self.model.register_forward_hook(self._count_call)
        if self.model.layout != "rows":
            require_trees(
                lambda rows: self.model(rows) if isinstance(self.model, ScalarModel) else self.model(rows)[0],
                name=start.load.path,
                vocab_size=int(self.model.network.config.vocab_size),
                dtype=start.load.dtype,
                device=device,
            )

    def _count_call(self, *_: object) -> None:
        self._calls += 1

    def answer_question(self, kind: str, *rest: Any) -> Any:
        """The answer to a question of the parent."""
        if kind == "pass":
            one, items, trees, args = rest
            before = self._calls
            found = one(self.model, items, trees, *args)
            assert self._calls == before + 1, f"{one.__name__} called the model {self._calls - before} times, not once"
            return found
        if kind == "come_back":
            self._residence.come_back()
            return None
        # Release the gathered layers, so that only the shards remain.
        self._engine.optimizer.get_param_coordinator().release_and_reset_all(self.model)
        if kind == "call":
            function, args = rest
            function(self.model, *args)
        else:
            assert kind == "leave", kind
            self._residence.move_away()
        return None


def serve_parent(pipe: Connection) -> None:
    """Answer questions until the parent closes the pipe. An error is reported to the parent and ends the rank."""
    try:
        start = pipe.recv()
        torch.set_num_threads(start.threads)
        shard = Shard(start)
        pipe.send(("answer", {"layout": shard.model.layout, "facts": shard.model.network.config.to_dict()}))
        while True:
            question = pipe.recv()
            pipe.send(("answer", shard.answer_question(*question)))
    except EOFError:
        return
    except ConfigError as mistake:
        pipe.send(("mistake", str(mistake)))
    except Exception:  # the boundary of the process: every error has to reach the parent
        pipe.send(("failed", traceback.format_exc()))


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the run handles Ctrl-C
    parent = os.pidfd_open(int(sys.argv[2]))

    def end_with_parent() -> None:
        has_ended(parent, None)
        os._exit(1)

    threading.Thread(target=end_with_parent, daemon=True).start()  # even in a collective
    serve_parent(Connection(int(sys.argv[1])))
    sys.stdout.flush()
    os._exit(0)  # gloo's threads sometimes abort the interpreter's own exit


if __name__ == "__main__":
    # Pickled questions refer to this module's classes by the module's name, not as parts of the main program.
    from flowrl.training.scoring_rank import main as run

    run()
