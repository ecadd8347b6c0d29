"""GPU health: which GPUs need attention, and how all of them do."""

from __future__ import annotations

from grafana_foundation_sdk.builders import dashboard
from grafana_foundation_sdk.cog.builder import Builder
from grafana_foundation_sdk.models import dashboard as models

from dashboards.parts import (
    BAD_FROM_ONE,
    CATALOG,
    GPU,
    MERGED,
    NOTHING,
    REMEDIES,
    SEVERITIES,
    TO_REPLICA,
    TO_RUNBOOK,
    WARN_FROM_ONE,
    YES_NO,
    Annotation,
    Band,
    Column,
    Steps,
    a_series,
    a_stat,
    a_table,
    a_timeline,
    assemble,
    columns,
    copied,
    count_of,
    mapped,
    metric,
    now,
    number,
    otherwise,
    over_time,
    ranked,
    variables,
)
from sidecar.probes.driver.xids import XIDS

_PLACE = "cluster, namespace, pod, node"
_GPU = "node, pod, gpu, uuid"
DETAIL = "Needs gpu_detail = true in the sidecar's settings; says so where it is off."
OFF = "gpu_detail is off"
USED = f"{metric('gpu_memory_used_bytes')} / {metric('gpu_memory_total_bytes')}"

_DRIVER_CODES = "|".join(code for code, owner in CATALOG.owner.items() if owner == "driver")
_OF_THE_DRIVER = f'code=~"{_DRIVER_CODES}"'
_XIDS = mapped({"-": ("no Xid was reported", None), **{str(code): (xid.meaning, None) for code, xid in XIDS.items()}})
_XID_ACTIONS = mapped({"-": ("Nothing to do", None), **{str(code): (xid.action, None) for code, xid in XIDS.items()}})
_HELD = mapped({"0": ("no", "green"), "1": ("yes", "orange")})
_FAILED = mapped({"0": ("no", "green"), "1": ("yes", "red")})
_ACTIONS = mapped({"none": ("none", "green")})


def lines(expr: str) -> str:
    """Draw a line per replica, GPU or node, as the variable ``lines`` says: the highest value of each."""
    return otherwise(f'max by (line) (label_join({expr}, "line", " GPU ", ${{lines:raw}}))', line="no GPU is visible")


def detailed(expr: str) -> str:
    """As `lines`, for what only gpu_detail exports."""
    return otherwise(f'max by (line) (label_join({expr}, "line", " GPU ", ${{lines:raw}}))', line=OFF)


def _strip() -> Band:
    recent = f"{metric('gpu_xid_last_timestamp_seconds')} * 1000 >= $__from"
    uncorrected = metric("gpu_ecc_errors_total", 'type="uncorrected"')
    recovering = metric("gpu_recovery_action_info", 'action!="none"')

    def tile(
        title: str, description: str, expr: str, thresholds: Steps = BAD_FROM_ONE
    ) -> tuple[int, Builder[models.Panel]]:
        return 3, a_stat(title, description, number(expr, title), thresholds=thresholds)

    return Band(
        4,
        [
            tile(
                "GPUs seen",
                "GPUs that NVML shows to the sidecars; one that several sidecars see counts once.",
                count_of(f"count by (uuid) ({metric('gpu_up')})"),
                ((None, "text"),),
            ),
            tile(
                "No answer",
                "GPUs that are lost, unreachable or hang.",
                count_of(f"count by (uuid) ({metric('gpu_up')} == 0)"),
            ),
            tile(
                "Missing",
                "GPUs that servers need and that NVML does not show.",
                f"sum(clamp_min({metric('gpus_expected')} - {metric('gpus_visible')}, 0)) or vector(0)",
            ),
            tile(
                "NVML down",
                "Replicas whose NVML could not be opened or asked.",
                count_of(f"{metric('nvml_up')} == 0"),
            ),
            tile(
                "Conditions",
                "GPUs that an active condition concerns.",
                count_of(f"count by (uuid) ({metric('gpu_condition_active')})"),
                WARN_FROM_ONE,
            ),
            tile(
                "Xids in range",
                "GPUs and Xid codes that the driver reported in this time range.",
                count_of(f"count by (uuid, xid) ({recent})"),
                WARN_FROM_ONE,
            ),
            tile(
                "ECC errors",
                "Uncorrectable memory errors since each driver was loaded.",
                f"sum(max by (uuid) ({uncorrected})) or vector(0)",
            ),
            tile(
                "To recover",
                "GPUs for which the driver asks for a recovery, such as a reset.",
                count_of(f"count by (uuid) ({recovering})"),
            ),
        ],
    )


def _attention() -> list[Band]:
    of_gpus = (
        f"max by ({_GPU}, code, severity) ({metric('gpu_condition_active')} "
        f"* on ({_PLACE}, code) group_left (severity) ({ranked(_PLACE)}))"
    )
    of_drivers = f"({ranked('node, pod', _OF_THE_DRIVER)}) unless on (pod, code) {metric('gpu_condition_active')}"
    shown = otherwise(f"{of_gpus} or {of_drivers}", code=NOTHING, severity="none", node="-", pod="-")
    table = columns(
        a_table(
            "GPUs and drivers that need attention",
            "Active conditions of the driver probe, for each GPU that they concern. A code leads to its runbook.",
            now(f"sort_desc({copied(shown, 'code', 'remedy')})"),
            tall=True,
        ),
        [
            Column(name="severity", title="Severity", width=80, mappings=SEVERITIES, colored=True),
            Column(name="node", title="Node", width=100),
            Column(name="pod", title="Replica", width=145, link=TO_REPLICA),
            Column(name="gpu", title="GPU", width=50),
            Column(name="code", title="Cause", width=175, link=TO_RUNBOOK),
            Column(name="remedy", title="What to do", mappings=REMEDIES, wrap=True),
        ],
    )
    window = "$__rate_interval"
    past = f"max_over_time({metric('gpu_condition_active', window=window)})"
    timeline = a_timeline(
        "GPU conditions over time",
        "Each condition of each GPU while it was active.",
        over_time(
            otherwise(f'max by (line) (label_join({past}, "line", " ", "node", "gpu", "code"))', line="no condition"),
            "{{line}}",
        ),
        mappings=mapped({"0": ("nothing is wrong", "green"), "1": ("active", "orange")}),
    )
    xids = columns(
        a_table(
            "Xid events",
            "Xids that the driver reported since the sidecar started, and NVIDIA's meaning of the code.",
            now(
                copied(
                    otherwise(
                        f"max by ({_GPU}, xid) ({metric('gpu_xid_last_timestamp_seconds')}) * 1000",
                        -1,
                        node="-",
                        pod="-",
                        xid="-",
                    ),
                    "xid",
                    "meaning",
                    "action",
                ),
                "A",
            ),
            now(copied(f"max by ({_GPU}, xid) ({metric('gpu_xid_errors_total')})", "xid", "meaning", "action"), "B"),
            sort=("Last", True),
            tall=True,
        ),
        [
            Column(name="node", title="Node", width=100),
            Column(name="pod", title="Replica", width=145, link=TO_REPLICA),
            Column(name="gpu", title="GPU", width=50),
            Column(name="xid", title="Xid", width=50),
            Column(name="meaning", title="Meaning", width=270, mappings=_XIDS, wrap=True),
            Column(name="action", title="What to do", mappings=_XID_ACTIONS, wrap=True),
            Column(
                name="Value #A",
                title="Last",
                width=125,
                unit="dateTimeFromNow",
                mappings=mapped({"-1": ("never", None)}),
            ),
            Column(name="Value #B", title="Events", width=65),
        ],
        joined=[MERGED],
    )
    return [
        Band(9, [(24, table)], "What is wrong"),
        Band(7, [(24, timeline)]),
        Band(7, [(24, xids)]),
    ]


def _inventory() -> Band:
    temperature: Steps = ((None, "green"), (75.0, "yellow"), (85.0, "red"))
    identity = otherwise(f"max by ({_GPU}, name) ({metric('gpu_info')})", node="-", pod="-", name="no GPU is visible")
    full: Steps = ((None, "blue"), (0.97, "orange"))
    table = columns(
        a_table(
            "Every GPU",
            "The state of each GPU now. Remap due: a row of memory waits for a reset to be replaced; failed: it could "
            "not be. ECC: uncorrectable errors since the driver was loaded. Recovery: what the driver asks for.",
            now(identity, "A"),
            now(f"max by ({_GPU}) ({metric('gpu_up')})", "B"),
            now(f"max by ({_GPU}) ({metric('gpu_temperature_celsius')})", "C"),
            now(f"max by ({_GPU}) ({metric('gpu_power_watts')})", "D"),
            now(f"max by ({_GPU}) ({metric('gpu_utilization_ratio')})", "E"),
            now(f"max by ({_GPU}) ({USED})", "F"),
            now(f"max by ({_GPU}) ({metric('gpu_row_remap_pending')})", "G"),
            now(f"max by ({_GPU}) ({metric('gpu_row_remap_failure')})", "H"),
            now(f"sum by ({_GPU}) ({metric('gpu_ecc_errors_total', _UNCORRECTED)})", "I"),
            now(f"max by ({_GPU}, action) ({metric('gpu_recovery_action_info')})", "J"),
            now(f"count by ({_GPU}) ({metric('gpu_condition_active')})", "K"),
            sort=("Conditions", True),
        ),
        [
            Column(name="node", title="Node", width=90),
            Column(name="pod", title="Replica", width=140, link=TO_REPLICA),
            Column(name="gpu", title="GPU", width=50),
            Column(name="name", title="Model"),
            Column(name="Value #B", title="Answers", width=75, mappings=YES_NO, colored=True),
            Column(name="Value #C", title="Temp.", width=65, unit="celsius", thresholds=temperature, colored=True),
            Column(name="Value #D", title="Power", width=70, unit="watt", decimals=0),
            Column(name="Value #E", title="Busy", width=60, unit="percentunit", decimals=0),
            Column(name="Value #F", title="Memory", width=120, unit="percentunit", gauge=(0, 1), thresholds=full),
            Column(name="Value #G", title="Remap due", width=90, mappings=_HELD, colored=True),
            Column(name="Value #H", title="Failed", width=60, mappings=_FAILED, colored=True),
            Column(name="Value #I", title="ECC", width=50, thresholds=BAD_FROM_ONE, colored=True),
            Column(name="action", title="Recovery", width=85, mappings=_ACTIONS),
            Column(name="Value #K", title="Conditions", width=90, thresholds=WARN_FROM_ONE, colored=True),
        ],
        joined=[MERGED],
    )
    return Band(10, [(24, table)], "Every GPU")


_UNCORRECTED = 'type="uncorrected"'


def _readings() -> list[Band]:
    shown = "The highest of each replica, GPU or node, as chosen above."
    temperature = a_series(
        "Temperature",
        f"Temperature of the GPU cores. {shown}",
        over_time(lines(metric("gpu_temperature_celsius")), "{{line}}"),
        unit="celsius",
        low=None,
        thresholds=((None, "transparent"), (85.0, "red")),
    )
    power = a_series(
        "Power",
        f"Power drawn by the boards. {shown}",
        over_time(lines(metric("gpu_power_watts")), "{{line}}"),
        unit="watt",
    )
    busy = a_series(
        "Busy",
        f"Share of the last sample period in which a kernel ran. {shown}",
        over_time(lines(metric("gpu_utilization_ratio")), "{{line}}"),
        unit="percentunit",
        high=1,
    )
    memory = a_series(
        "Memory used",
        f"Share of the GPU memory that is in use. {shown}",
        over_time(lines(USED), "{{line}}"),
        unit="percentunit",
        high=1,
    )
    window = "$__rate_interval"
    errors = a_series(
        "Memory errors",
        "New memory errors by type: corrected ones are harmless, uncorrected ones are not.",
        over_time(
            otherwise(
                f"sum by (type) (increase({metric('gpu_ecc_errors_total', window=window)}))", type="no GPU is visible"
            ),
            "{{type}}",
        ),
        unit="none",
    )
    rows = a_series(
        "Remapped rows",
        "Rows of GPU memory that were remapped, by the kind of errors that caused it.",
        over_time(
            otherwise(f"sum by (cause) ({metric('gpu_remapped_rows')})", cause="no GPU tells"), "{{cause}} errors"
        ),
        unit="none",
    )
    return [
        Band(8, [(12, temperature), (12, power)], "Readings"),
        Band(8, [(12, busy), (12, memory)]),
        Band(7, [(12, errors), (12, rows)]),
    ]


def _detail() -> list[Band]:
    reasons = f"sum by (reason) ({metric('gpu_clock_event_active')})"
    held = a_series(
        "Clocks held back",
        f"GPUs whose clocks are held back, by reason. A power cap that is reached is normal. {DETAIL}",
        over_time(otherwise(reasons, reason=OFF), "{{reason}}"),
        unit="none",
        decimals=0,
    )
    down = f"{metric('gpu_nvlink_links')} - {metric('gpu_nvlink_links_active')}"
    nvlink = a_series(
        "NVLinks down",
        f"NVLinks that should be up and are not. {DETAIL}",
        over_time(detailed(down), "{{line}}"),
        unit="none",
        decimals=0,
    )
    table = columns(
        a_table(
            "Links of each GPU",
            "PCIe generation and lanes now and at most (an idle GPU slows its link down by itself), NVLinks, and the "
            f"registration with the NVSwitch fabric. {DETAIL}",
            now(otherwise(f"max by ({_GPU}) ({metric('gpu_pcie_link_generation')})", node="-", pod=OFF), "A"),
            now(f"max by ({_GPU}) ({metric('gpu_pcie_link_generation_max')})", "B"),
            now(f"max by ({_GPU}) ({metric('gpu_pcie_link_width')})", "C"),
            now(f"max by ({_GPU}) ({metric('gpu_pcie_link_width_max')})", "D"),
            now(f"max by ({_GPU}) ({metric('gpu_nvlink_links_active')})", "E"),
            now(f"max by ({_GPU}) ({metric('gpu_nvlink_links')})", "F"),
            now(f"max by ({_GPU}) ({metric('gpu_fabric_healthy')})", "G"),
            sort=("Replica", False),
        ),
        [
            Column(name="node", title="Node", width=110),
            Column(name="pod", title="Replica", link=TO_REPLICA),
            Column(name="gpu", title="GPU", width=60),
            Column(name="Value #A", title="PCIe gen.", width=90),
            Column(name="Value #B", title="at most", width=80),
            Column(name="Value #C", title="Lanes", width=80),
            Column(name="Value #D", title="at most ", width=80),
            Column(name="Value #E", title="NVLinks up", width=100),
            Column(name="Value #F", title="NVLinks", width=90),
            Column(name="Value #G", title="Fabric", width=90, mappings=_FABRIC, absent="none", colored=True),
        ],
        joined=[MERGED],
    )
    return [
        Band(8, [(12, held), (12, nvlink)], "Links and clocks (gpu_detail)"),
        Band(9, [(24, table)]),
    ]


_FABRIC = mapped({"0": ("not ready", "red"), "1": ("ready", "green")})


def board() -> models.Dashboard:
    """Build the dashboard."""
    options = {"replica": '"pod"', "GPU": '"pod", "gpu"', "node": '"node"'}
    chooser = (
        dashboard.CustomVariable("lines")
        .label("Lines per")
        .description("What the charts draw a line of")
        .values(", ".join(f"{text} : {value.replace(',', chr(92) + ',')}" for text, value in options.items()))
        .options(
            [
                models.VariableOption(selected=not index, text=text, value=value)
                for index, (text, value) in enumerate(options.items())
            ]
        )
        .current(models.VariableOption(selected=True, text="replica", value='"pod"'))
    )
    xid = metric("gpu_xid_last_timestamp_seconds")
    return assemble(
        GPU,
        "Which GPUs need attention, and how all of them do: conditions, Xids, memory errors, readings, links.",
        [_strip(), *_attention(), _inventory(), *_readings(), *_detail()],
        chosen=[*variables(), chooser],
        annotations=[
            Annotation(
                "Xid events",
                f"max by (pod, node, gpu, xid) ({xid}) * 1000 >= $__from",
                color="red",
                title="Xid {{xid}}",
                text="GPU {{gpu}} of {{pod}} on {{node}}",
                value_is_time=True,
            )
        ],
    )
