# SPDX-License-Identifier: Apache-2.0
"""``rl-insight-report rebalance``: a map of experts on devices, and what it will bring."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rl_insight_hooks.report.commands.options import (
    EpSize,
    GmmPerLayer,
    Jobs,
    Layer,
    NumMoeLayers,
    Rank,
    Step,
    Strict,
)


def rebalance(
    data: Annotated[
        list[Path] | None,
        typer.Argument(help="Recorded loads: files or folders.", metavar="DATA..."),
    ] = None,
    json_folder: Annotated[
        Path | None,
        typer.Option("--json-folder", "--json_folder", help="MindSpeed-RL's name of DATA."),
    ] = None,
    num_replicas: Annotated[
        int | None,
        typer.Option("--num-replicas", "--num_replicas", help="Physical slots of all devices."),
    ] = None,
    num_groups: Annotated[
        int,
        typer.Option("--num-groups", "--num_groups", help="Expert groups; 1: none to keep whole."),
    ] = 1,
    num_nodes: Annotated[
        int, typer.Option("--num-nodes", "--num_nodes", help="Nodes of the server.")
    ] = 1,
    num_devices: Annotated[
        int | None,
        typer.Option(
            "--num-npus",
            "--num_npus",
            "--num-gpus",
            "--num_gpus",
            "--num-devices",
            help="Devices of all nodes.",
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", "--output-path", "--output_path", help="The map to write."),
    ] = None,
    format: Annotated[
        str | None,
        typer.Option(
            "--format", help="vllm-ascend, sglang, tensorrt-llm or deepseek; else by the ending."
        ),
    ] = None,
    from_map: Annotated[
        Path | None,
        typer.Option("--from-map", help="The map in use: improve it with few moves."),
    ] = None,
    max_moves: Annotated[
        float | None,
        typer.Option("--max-moves", help="Expert transfers at most; below 1: a share of slots."),
    ] = None,
    moves_output: Annotated[
        Path | None,
        typer.Option("--moves", help="Transfer plan; else beside the map."),
    ] = None,
    expert_size_bytes: Annotated[
        int | None,
        typer.Option("--expert-size-bytes", min=1, help="Weights of one expert of one layer."),
    ] = None,
    holdout: Annotated[
        float,
        typer.Option("--holdout", help="Share of the steps that the forecast is scored on."),
    ] = 0.5,
    half_life: Annotated[
        float | None,
        typer.Option("--half-life", help="Steps after which a load counts half; else all alike."),
    ] = None,
    evaluate_on: Annotated[
        list[Path] | None,
        typer.Option("--evaluate-on", help="Other data to score the plan on."),
    ] = None,
    sweep_replicas: Annotated[
        str | None,
        typer.Option("--sweep-replicas", help="Balance against memory: 256,272,288."),
    ] = None,
    plot: Annotated[
        Path | None, typer.Option("--plot", help="PNG: loads before and after, or the sweep.")
    ] = None,
    min_gain: Annotated[
        float, typer.Option("--min-gain", help="Warn if the plan gains less than this share.")
    ] = 0.02,
    fail_above: Annotated[
        float | None,
        typer.Option("--fail-above", help="Exit with 3 if the forecast max/mean is above."),
    ] = None,
    first_moe_layer: Annotated[
        int | None,
        typer.Option(
            "--first-moe-layer",
            min=0,
            help="Decoder layer of MoE layer 0, where the data counts MoE layers only.",
        ),
    ] = None,
    num_hidden_layers: Annotated[
        int | None,
        typer.Option("--num-hidden-layers", help="sglang: decoder layers of the model."),
    ] = None,
    step: Step = None,
    role: Annotated[
        str | None, typer.Option("--role", help="Role to plan for; a,b adds them up.")
    ] = None,
    rank: Rank = None,
    layer: Layer = None,
    phase: Annotated[str | None, typer.Option("--phase", help="Phase: forward, ...")] = None,
    aggregate: Annotated[
        str, typer.Option("--aggregate", help="Over ranks: auto, sum, max or one-rank.")
    ] = "auto",
    gmm_per_layer: GmmPerLayer = None,
    num_moe_layers: NumMoeLayers = None,
    ep_size: EpSize = None,
    strict: Strict = False,
    force: Annotated[
        bool, typer.Option("--force", "-f", help="Replace even the map that was loaded.")
    ] = False,
    jobs: Jobs = 1,
    json: Annotated[bool, typer.Option("--json", help="The result as JSON on stdout.")] = False,
) -> None:
    """Plan which experts (with replicas) go on which device, say what that will bring, and write the map."""
    from rl_insight_hooks.report.rebalance_run import Request, run

    run(
        Request(
            data=[*(data or []), *([json_folder] if json_folder is not None else [])],
            num_replicas=num_replicas,
            num_groups=num_groups,
            num_nodes=num_nodes,
            num_devices=num_devices,
            output=output,
            format=format,
            from_map=from_map,
            max_moves=max_moves,
            moves_output=moves_output,
            expert_size_bytes=expert_size_bytes,
            holdout=holdout,
            half_life=half_life,
            evaluate_on=evaluate_on or [],
            sweep_replicas=sweep_replicas,
            plot=plot,
            min_gain=min_gain,
            fail_above=fail_above,
            first_moe_layer=first_moe_layer,
            num_hidden_layers=num_hidden_layers,
            filters={"steps": step, "ranks": rank, "layers": layer, "phases": phase},
            role=role,
            aggregate=aggregate,
            dump_facts={
                "gmm_per_layer": gmm_per_layer,
                "num_moe_layers": num_moe_layers,
                "ep_size": ep_size,
            },
            strict=strict,
            force=force,
            jobs=jobs,
            json=json,
        )
    )
