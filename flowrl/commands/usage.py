"""What `flowrl` without a command prints."""

from __future__ import annotations

HELP = ("-h", "--help", "help")
USAGE = """\
usage: flowrl COMMAND

  setup cpu|environments
        install into this Python's environment what flowrl needs on a machine without GPUs, or the packages whose
        environments it can play
  quickstart [--steps N] [--control]
        train a small model on addition, in some minutes on a CPU, and print what it learnt
  graphs
        list the graphs that come with flowrl, which run by name
  new   MY_GRAPH.py --from NAME, or MY_NODE.py --node reward|filter|environment|objective|source
        copy one of them to a file, to be edited; or write the skeleton of a part of your own, with its test
  check GRAPH [--draw FILE.svg|FILE.mmd] [--cluster SPEC] [--config FILE] [--preflight] [--try] [--field value ...]
        find every problem of a graph and print what follows from it; starts nothing.
        --preflight: also load models, task, reward and environment, and try them out as a run does before it starts.
        --try: also make two batches through the whole graph in one process, with stand-ins for models
  run   GRAPH [--steps N] [--run-dir DIR] [--resume] [--here] [--config FILE] [--field value ...]
        run a graph; with --here in this process, where breakpoint() and print work.
        After GRAPH, --help shows the twenty options that most runs set and the groups of the others;
        --help GROUP lists one group, --help OPTION explains an option, and --help-all lists everything.
        --save-config FILE writes them to a file that --config reads;
        --dry-run prints them, checks graph, model, data and reward, and starts nothing
  tune  GRAPH [--steps N] [--verify N] [--budget MINUTES] [--run-dir DIR] [--dry-run] [--json] [--field value ...]
        measure the stages of a graph in short runs, predict the step of every placement that fits (cores, GPUs,
        replicas, staleness, turns), verify the first ones, and write a file that run --config takes
  audit RUN_DIR [--whole]
        prove a run's ledger and its staleness bound from its own records; goes on from where the last audit stopped,
        and proves that what that one has seen is unchanged. --whole begins anew
  samples RUN_DIR [--step N] [--best|--worst|--failed] [--held-out] [--diff STEP] [--limit N] [--json]
        print what the model said: prompts, responses, rewards, and what became of each sample
  show  RUN_DIR [SAMPLE] [--plain]
        print an episode as the policy saw it, token by token; without SAMPLE list those that are kept
  evaluate MODEL [--task TASK | --evaluate-task FILE ...] [--prompts N] [--evaluate-samples K]
        answer the prompts of files, or held-out prompts, with a model, without training, and print how many are right
  generate MODEL --task TASK --out FILE.jsonl [--group-size N] [--score | --best]
        write a model's responses to a file, the best of N with --best; the same command goes on with the file
  score FILE.jsonl [--task.reward REWARD | --reward-model DIR] --out SCORED.jsonl
        write the rewards of responses that a file has
  chat  MODEL|RUN_DIR
        talk to a model in the terminal
  merge ADAPTER --out DIR [--base MODEL]
        put an adapter into the weights of its base model
  export RUN_DIR|CHECKPOINT --name DIR, or --to hub --name OWNER/NAME
        copy or upload a checkpoint's model, without what only a resume needs
  doctor [--address HOST:6379] [--json]
        find out what this machine or a cluster can do: packages, GPUs, /dev/shm, compilers, Ray, tcp between machines
  gpu-check [--out DIR] [--only STAGE ...] [--again] [--device cpu]
        try out on this machine's GPUs what a CPU cannot show, stage by stage; goes on where it stopped
  serve-reward MODEL|FILE.py:FUNCTION [--port N] [--host ADDRESS] [--label NAME] [--weights NAME=WEIGHT,...]
        answer rewards over HTTP, for graphs that name the address as their reward
  version

GRAPH is the name of a graph of flowrl, such as grpo, or a file of your own.

to begin with:

  flowrl check grpo
  flowrl run grpo --steps 20 --run-dir runs/first
  flowrl audit runs/first"""
OWN_HELP = (
    "setup",
    "quickstart",
    "samples",
    "evaluate",
    "generate",
    "score",
    "chat",
    "merge",
    "export",
    "doctor",
    "gpu-check",
)
"""Commands that print their own help."""
WITHOUT_OPTIONS = ("graphs", "audit", "show", "version")
"""Commands that print the usage if any argument asks for help."""
