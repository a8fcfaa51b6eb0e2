# SPDX-License-Identifier: Apache-2.0
"""The work of ``rl-insight-report rebalance``: check, read, plan, judge, write, say."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict

import msgspec

from rl_insight_hooks.errors import DataError, RlInsightError, ThresholdExceededError, UsageError
from rl_insight_hooks.rebalance import formats
from rl_insight_hooks.rebalance.assess import (
    Assessment,
    HeldOut,
    assess,
    hold_out,
    linear_of,
    sweep,
)
from rl_insight_hooks.rebalance.history import total
from rl_insight_hooks.rebalance.incremental import Move, moves_allowed, replan
from rl_insight_hooks.rebalance.placement import Placement
from rl_insight_hooks.rebalance.planner import plan
from rl_insight_hooks.rebalance.score import Score, score, total_variation
from rl_insight_hooks.rebalance.shape import make_shape
from rl_insight_hooks.report import rebalance_text as text
from rl_insight_hooks.report.load import load
from rl_insight_hooks.report.rebalance_data import PlanData, only_layers, plan_data
from rl_insight_hooks.report.rebalance_write import (
    beside_collects,
    check_moves,
    check_plot,
    check_target,
    write,
)
from rl_insight_hooks.report.speak import (
    fail_if_incomplete,
    need_rows,
    progress_on_terminal,
    say_findings,
    write_json_line,
)
from rl_insight_hooks.report.table import LoadTable, Problem

_FAR = 0.1  # total variation of two loads from which a plan of one is doubtful for the other


class DumpFacts(TypedDict):
    """What msprobe's and Megatron's dumps do not say, for :func:`load`."""

    gmm_per_layer: int | None
    num_moe_layers: int | None
    ep_size: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """The command line."""

    data: list[Path]
    num_replicas: int | None
    num_groups: int
    num_nodes: int
    num_devices: int | None
    output: Path | None
    format: str | None
    from_map: Path | None
    max_moves: float | None
    moves_output: Path | None
    expert_size_bytes: int | None
    holdout: float
    half_life: float | None
    evaluate_on: list[Path]
    sweep_replicas: str | None
    plot: Path | None
    min_gain: float
    fail_above: float | None
    first_moe_layer: int | None
    num_hidden_layers: int | None
    filters: dict[str, str | None]
    role: str | None
    aggregate: str
    dump_facts: DumpFacts
    strict: bool
    force: bool
    jobs: int
    json: bool


@dataclass(frozen=True, slots=True)
class _Evaluation:
    """The plan on other data."""

    data: PlanData
    before: Score
    after: Score
    distance: float


def run(request: Request) -> None:
    """Do what the command line asks.

    Raises:
        RlInsightError: with the exit code of its class.
    """
    format = _check(request)
    with progress_on_terminal("reading") as progress:
        table = _load(request, request.data, request.role, progress)
    need_rows(
        table,
        role=request.role,
        **{name.removesuffix("s"): value for name, value in request.filters.items()},
    )
    data = plan_data(
        table, several_roles=request.role is not None, first_moe_layer=request.first_moe_layer
    )
    say_findings(table.problems, (*table.assumptions, *data.remarks))
    if request.sweep_replicas is not None:
        _sweep(request, data)
    others: Sequence[Problem] = ()
    if request.num_replicas is not None or request.from_map is not None:
        others = _plan(request, data, format)
    fail_if_incomplete([*table.problems, *others])


def _check(request: Request) -> str | None:
    """Find what cannot work before anything is read; return the map's format if one is written."""
    if not request.data:
        raise UsageError("rebalance needs DATA: files or folders of recorded loads")
    if request.num_replicas is None and request.from_map is None and not request.sweep_replicas:
        raise UsageError(
            "rebalance needs --num-replicas (or --from-map, or --sweep-replicas for a table)"
        )
    if request.num_devices is None and (request.from_map is None or request.sweep_replicas):
        raise UsageError("rebalance needs --num-npus, the devices that the experts go on")
    if request.max_moves is not None and request.from_map is None:
        raise UsageError("--max-moves counts transfers from a map in use: give it with --from-map")
    if request.json and request.sweep_replicas and request.num_replicas is not None:
        raise UsageError("--json prints one result: give --sweep-replicas or --num-replicas")
    for name, value in (("--min-gain", request.min_gain), ("--fail-above", request.fail_above)):
        if value is not None and math.isnan(value):
            raise UsageError(f"{name} is nan; give a number")
    if not 0 < request.holdout < 1:
        raise UsageError(f"--holdout is {request.holdout}; give a share of the steps, as 0.5")
    moves_allowed(request.max_moves, 1)
    if request.plot is not None:
        check_plot(request.plot, request.force)
    if request.from_map is None and request.moves_output is not None:
        raise UsageError("--moves is for the transfers from a map in use: give it with --from-map")
    moves_output = moves_path(request)
    if moves_output is not None:
        check_moves(moves_output, request.force)
    if request.output is None:
        if request.format is not None:
            raise UsageError("--format says how a map is written: give -o as well")
        return None
    if request.num_replicas is None and request.from_map is None:
        raise UsageError("-o writes a map: give --num-replicas or --from-map beside the sweep")
    format = formats.format_of(request.output, request.format)
    if request.num_hidden_layers is not None and format != "sglang":
        raise UsageError(f"--num-hidden-layers is for sglang maps; a {format} map has none to fill")
    check_target(request.output, request.from_map, request.force)
    return format


def moves_path(request: Request) -> Path | None:
    """Return where the transfers are written: where the user says, else beside the map."""
    if request.from_map is None or (request.moves_output is None and request.output is None):
        return None
    if request.moves_output is not None:
        return request.moves_output
    assert request.output is not None
    return request.output.with_suffix(".moves.json")


def _load(request: Request, paths: list[Path], role: str | None, progress: Any) -> LoadTable:
    return load(
        paths,
        steps=request.filters["steps"],
        ranks=request.filters["ranks"],
        layers=request.filters["layers"],
        phases=request.filters["phases"],
        roles=role,
        merge_ranks=True,
        aggregate=request.aggregate,
        strict=request.strict,
        jobs=request.jobs,
        progress=progress,
        **request.dump_facts,
    )


def _plan(request: Request, data: PlanData, format: str | None) -> Sequence[Problem]:
    """Plan, judge, write and say; return the problems of the data that the plan was evaluated on."""
    old = _read_map(request, data) if request.from_map is not None else None
    held = _hold_out(request, data, old)
    moves: list[Move] = []
    if old is not None:
        placement, moves = replan(
            old, data.history_WLE, request.max_moves, half_life=request.half_life
        )
    else:
        assert request.num_replicas is not None
        assert request.num_devices is not None
        placement = plan(
            data.history_WLE,
            request.num_replicas,
            request.num_groups,
            request.num_nodes,
            request.num_devices,
            layer_ids=data.layer_ids,
            half_life=request.half_life,
        )
    result = assess(data.history_WLE, placement, old, held_out=held)
    evaluations, unfit, problems = _evaluate(request, data, placement, old)
    warnings = [*_warnings(request, data, result, evaluations, format), *unfit]
    encoded = None
    if format is not None:
        encoded = formats.encode(placement, format, num_hidden_layers=request.num_hidden_layers)
    written = _write(request, placement, result, moves, encoded)
    for warning in warnings:
        print(f"warning: {warning}", file=sys.stderr, flush=True)
    if request.json:
        write_json_line(
            _result_dict(request, data, placement, result, moves, evaluations, warnings, written)
        )
    else:
        _say(request, data, placement, result, moves, evaluations, written)
    if request.fail_above is not None and result.forecast.mean > request.fail_above:
        raise ThresholdExceededError(
            f"the forecast max/mean is {result.forecast.mean:.4f}, above --fail-above {request.fail_above}"
        )
    return problems


def _read_map(request: Request, data: PlanData) -> Placement:
    assert request.from_map is not None
    try:
        content = request.from_map.read_bytes()
    except OSError as error:
        raise UsageError(f"--from-map {request.from_map}: {error.strerror}") from None
    try:
        if formats.sniff(content) == "sglang" and not data.layers_are_absolute:
            raise UsageError(
                "sglang maps go by decoder layers, but the data counts MoE layers from 0: give "
                "--first-moe-layer (0 if no layer is dense)"
            )
        old = formats.decode(
            content,
            num_experts=data.history_WLE.shape[2],
            num_devices=request.num_devices,
            num_groups=request.num_groups,
            num_nodes=request.num_nodes,
            layer_ids=data.layer_ids,
        )
    except RlInsightError as error:
        raise type(error)(f"--from-map {request.from_map}: {error}") from None
    if request.num_replicas is not None and request.num_replicas != old.num_replicas:
        raise UsageError(
            f"--num-replicas is {request.num_replicas}, but the map in use has {old.num_replicas} slots; "
            "leave it out, or plan anew without --from-map"
        )
    return old


def _hold_out(request: Request, data: PlanData, old: Placement | None) -> HeldOut | None:
    if len(data.history_WLE) < 2:
        return None
    if old is not None:
        shape = old.shape
    else:
        assert request.num_replicas is not None
        assert request.num_devices is not None
        shape = make_shape(
            data.history_WLE.shape[2],
            request.num_replicas,
            request.num_groups,
            request.num_nodes,
            request.num_devices,
        )
    return hold_out(
        data.history_WLE,
        shape,
        request.holdout,
        before=old,
        max_moves=request.max_moves,
        half_life=request.half_life,
    )


def _evaluate(
    request: Request, planned: PlanData, placement: Placement, old: Placement | None
) -> tuple[list[_Evaluation], list[str], Sequence[Problem]]:
    """Score the plan on each role of the other data; return (scores, roles it does not fit, problems).

    Raises:
        DataError: it fits no role.
    """
    if not request.evaluate_on:
        return [], [], ()
    table = load(
        request.evaluate_on,
        ranks=request.filters["ranks"],
        phases=request.filters["phases"],
        merge_ranks=True,
        aggregate=request.aggregate,
        strict=request.strict,
        jobs=request.jobs,
        **request.dump_facts,
    )
    say_findings(table.problems, table.assumptions)
    before = old if old is not None else linear_of(placement.shape, placement.num_layers)
    planned_LE = total(planned.history_WLE)
    found, unfit = [], []
    for index in sorted(set(table.role_N.tolist())):
        rows = table.take(table.role_N == index)
        data = plan_data(rows, first_moe_layer=request.first_moe_layer)
        try:
            history_WLE = only_layers(data, placement.layer_ids, placement.num_experts)
        except DataError as error:
            unfit.append(f"not scored on role {', '.join(data.roles)}: {error}")
            continue
        load_LE = total(history_WLE)
        distance = float(total_variation(planned_LE, load_LE).mean())
        found.append(_Evaluation(data, score(load_LE, before), score(load_LE, placement), distance))
    if not found:
        raise DataError("; ".join(unfit) or "the data to evaluate on holds no counts")
    return found, unfit, table.problems


def _warnings(
    request: Request,
    data: PlanData,
    result: Assessment,
    evaluations: list[_Evaluation],
    format: str | None,
) -> list[str]:
    """Return what speaks against the plan, in sentences."""
    said = []
    if result.gain < request.min_gain:
        said.append(
            f"the plan does not pay: it lowers the heaviest device by {result.gain:.1%}, less than "
            f"{request.min_gain:.0%} (--min-gain); what is in use is nearly as good"
        )
    held = result.held_out
    if held is not None and held.total_variation_L.mean() > _FAR:
        said.append(
            f"loads drift: the first and the last steps differ by {held.total_variation_L.mean():.2f} (total "
            "variation); plan often, or weigh late steps more (--half-life)"
        )
    for evaluation in evaluations:
        said += _differences(data, evaluation)
    if format in ("sglang", "tensorrt-llm") and not data.layers_are_absolute:
        said.append(
            f"{format} maps go by decoder layers, but the data counts MoE layers from 0: give "
            "--first-moe-layer (0 if no layer is dense)"
        )
    if request.output is not None and beside_collects(request.output):
        said.append(
            f"{request.output} lies beside eplb_token_collects files: MindSpeed-RL's own tool reads "
            f"every .json "
            "there as counts; better write the map elsewhere"
        )
    return said


def _differences(planned: PlanData, evaluation: _Evaluation) -> list[str]:
    other, said = evaluation.data, []
    name = ", ".join(other.roles)
    if planned.roles != other.roles:
        said.append(f"the plan is for role {', '.join(planned.roles)}, scored on role {name}")
    if planned.steps and other.steps and not set(planned.steps) & set(other.steps):
        said.append(f"the plan is for {planned.steps_text}, scored on {other.steps_text}")
    if evaluation.distance > _FAR:
        said.append(
            f"the loads of role {name} differ from those planned on by {evaluation.distance:.2f} "
            f"(total variation, "
            f"mean over layers; above {_FAR}): do not expect the plan to fit"
        )
    if evaluation.after.mean >= evaluation.before.mean:
        said.append(f"on role {name} the plan is no better than what is in use")
    return said


def _write(
    request: Request,
    placement: Placement,
    result: Assessment,
    moves: list[Move],
    encoded: bytes | None,
) -> dict[str, str]:
    """Write map, transfer plan and picture; return their paths by what they are."""
    written: dict[str, str] = {}
    moves_output = moves_path(request)
    if request.plot is not None and not request.sweep_replicas:
        from rl_insight_hooks.report.rebalance_plot import before_after_png

        write(request.plot, before_after_png(placement, result))
        written["plot"] = str(request.plot)
    if moves_output is not None:
        plan_of_moves = text.moves_dict(moves, request.expert_size_bytes)
        write(moves_output, msgspec.json.format(msgspec.json.encode(plan_of_moves), indent=1))
        written["moves"] = str(moves_output)
    if encoded is not None and request.output is not None:
        write(request.output, encoded)
        written["map"] = str(request.output)
    return written


def _say(
    request: Request,
    data: PlanData,
    placement: Placement,
    result: Assessment,
    moves: list[Move],
    evaluations: list[_Evaluation],
    written: dict[str, str],
) -> None:
    old_name = (
        "experts in order, no replicas" if request.from_map is None else str(request.from_map)
    )
    lines = [text.shape_line(placement), f"planned on: {data.text}", ""]
    lines += text.layer_table(placement, result, old_name)
    lines += ["", *text.forecast_lines(result)]
    for evaluation in evaluations:
        lines.append(
            text.evaluation_line(
                evaluation.data.text, evaluation.before, evaluation.after, evaluation.distance
            )
        )
    if request.from_map is not None:
        num_slots = placement.physical_to_logical.size
        lines += text.move_lines(moves, num_slots, request.expert_size_bytes)
    lines += [f"{what} written: {path}" for what, path in written.items()]
    print("\n".join(lines))


def _result_dict(
    request: Request,
    data: PlanData,
    placement: Placement,
    result: Assessment,
    moves: list[Move],
    evaluations: list[_Evaluation],
    warnings: list[str],
    written: dict[str, str],
) -> dict[str, Any]:
    return {
        "schema": text.SCHEMA,
        "roles": data.roles,
        "phase": data.phase,
        "steps": data.steps,
        "layers_are_absolute": data.layers_are_absolute,
        **text.assessment_dict(placement, result),
        "evaluations": [
            {
                "roles": evaluation.data.roles,
                "phase": evaluation.data.phase,
                "steps": evaluation.data.steps,
                "before": text.score_dict(evaluation.before, placement.layer_ids),
                "after": text.score_dict(evaluation.after, placement.layer_ids),
                "total_variation": evaluation.distance,
            }
            for evaluation in evaluations
        ],
        "transfers": None
        if request.from_map is None
        else text.moves_dict(moves, request.expert_size_bytes),
        "physical_to_logical": placement.physical_to_logical.tolist(),
        "written": written,
        "warnings": warnings,
    }


def _sweep(request: Request, data: PlanData) -> None:
    assert request.sweep_replicas is not None
    assert request.num_devices is not None
    try:
        replicas = [int(part) for part in request.sweep_replicas.split(",") if part.strip()]
    except ValueError:
        raise UsageError(
            f"--sweep-replicas is {request.sweep_replicas!r}; write numbers, as 256,272,288"
        ) from None
    if not replicas:
        raise UsageError("--sweep-replicas names no number; write numbers, as 256,272,288")
    rows = sweep(
        data.history_WLE,
        replicas,
        request.num_groups,
        request.num_nodes,
        request.num_devices,
        holdout=request.holdout,
        expert_size_bytes=request.expert_size_bytes,
        half_life=request.half_life,
    )
    written: dict[str, str] = {}
    if request.plot is not None:
        from rl_insight_hooks.report.rebalance_plot import sweep_png

        write(request.plot, sweep_png(rows))
        written["plot"] = str(request.plot)
    if request.json:
        write_json_line(
            {
                "schema": text.SWEEP_SCHEMA,
                "roles": data.roles,
                "phase": data.phase,
                "steps": data.steps,
                "rows": text.sweep_dict(rows, data.layer_ids),
                "written": written,
            }
        )
    else:
        lines = [f"planned on: {data.text}", *text.sweep_lines(rows)]
        lines += [f"{what} written: {path}" for what, path in written.items()]
        print("\n".join(lines))
