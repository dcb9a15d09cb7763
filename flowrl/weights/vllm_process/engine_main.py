"""The first module of a process that vLLM spawns; see `engine_process.begun_by_us`."""

from __future__ import annotations

from flowrl.weights.vllm_process.engine_process import adopt_process, collect_once_loaded, interpret_triton

if __name__ == "__mp_main__":  # the name that multiprocessing gives to the main module of what it spawns
    adopt_process()
    collect_once_loaded()
    interpret_triton()
