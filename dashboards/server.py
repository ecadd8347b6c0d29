"""Server environment: one replica, everything about it, cause and remedy first."""

from __future__ import annotations

from grafana_foundation_sdk.builders import dashboard
from grafana_foundation_sdk.models import common as shapes
from grafana_foundation_sdk.models import dashboard as models

from dashboards.parts import (
    BAD_FROM_ONE,
    DATASOURCE,
    MEANINGS,
    MERGED,
    NOTHING,
    REMEDIES,
    SERVER,
    SEVERITIES,
    TO_RUNBOOK,
    UNKNOWN,
    UP_DOWN,
    VERDICTS,
    YES_NO,
    Annotation,
    Band,
    Column,
    a_series,
    a_stat,
    a_table,
    a_timeline,
    assemble,
    columns,
    copied,
    count_of,
    joined_by,
    mapped,
    metric,
    now,
    number,
    otherwise,
    over_time,
    ranked,
    select,
    steps,
    variables,
    verdict,
)

SERIOUS = 'severity!="info"'
_ACTIVE = metric("condition_active", SERIOUS)
_UNKNOWN = "-1"
STATES = mapped(
    {
        "0": ("nothing is wrong", "green"),
        "1": ("not judged", "purple"),
        "2": ("warning", "orange"),
        "3": ("critical", "red"),
    }
)
VERSIONS = mapped(
    {
        "-1": ("unknown", "purple"),
        "0": ("none", "text"),
        "2": ("FA2", "blue"),
        "3": ("FA3", "blue"),
        "4": ("FA4", "blue"),
    }
)
_EVIDENCE = mapped({"0": ("by reading files", None), "1": ("by a real import", None)})
_SATISFIED = mapped({"0": ("violated", "red"), "1": ("satisfied", "green")})
_DIFFERS = mapped({"1": ("differs", "orange")})
_OUTCOMES = mapped({"0": ("failed", "red"), "1": ("answered", "green")})
_STUCK = mapped({"1": ("stuck", "red")})
_BASELINE = mapped({"0": ("unreadable", "orange"), "1": ("loaded", "green")})
_DEMO = mapped({"0": ("its machine", "text"), "1": ("a demo", "purple")})
FAILED = 'outcome!="ok"'
USED = f"{metric('gpu_memory_used_bytes')} / {metric('gpu_memory_total_bytes')}"

TIMESTAMP = "dateTimeFromNow"


def _strip() -> list[Band]:
    versions = metric("flash_attention_version", 'phase=~"prefill|decode"')
    gpus = [
        number(otherwise(f"max({metric('gpus_visible')})", -1), "visible", "A"),
        number(otherwise(f"max({metric('gpus_expected')})", -1), "expected", "B"),
        number(otherwise(f"max({metric('gpus_in_scope')})", -1), "in scope", "C"),
    ]
    unknown = mapped({_UNKNOWN: ("unknown", "purple")})
    both = shapes.BigValueTextMode.VALUE_AND_NAME
    return [
        Band(
            4,
            [
                (
                    4,
                    a_stat(
                        "Verdict",
                        "The worst of what is known now; silent: the sidecar does not answer.",
                        number(otherwise(verdict("pod"), -1), "verdict"),
                        mappings=VERDICTS,
                        filled=True,
                    ),
                ),
                (
                    3,
                    a_stat(
                        "Causes",
                        "Active conditions of severity critical or warning.",
                        number(count_of(f"{_ACTIVE} == 1"), "causes"),
                        thresholds=BAD_FROM_ONE,
                    ),
                ),
                (
                    3,
                    a_stat(
                        "Not judged",
                        "Conditions that concern this server and could not be judged.",
                        number(count_of(metric("condition_unknown")), "conditions"),
                        thresholds=((None, "green"), (1.0, "purple")),
                    ),
                ),
                (
                    3,
                    a_stat(
                        "Server",
                        "Whether the server's address answers in HTTP.",
                        number(otherwise(f"max({metric('server_up')})", -1), "server"),
                        mappings=UP_DOWN,
                    ),
                ),
                (
                    3,
                    a_stat(
                        "Server started",
                        "When the server's main process started; unknown while that process cannot be seen.",
                        number(otherwise(f"max({metric('server_start_time_seconds')}) * 1000", -1), "started"),
                        unit=TIMESTAMP,
                        mappings=unknown,
                    ),
                ),
                (
                    4,
                    a_stat(
                        "FlashAttention",
                        "Implementation in use per phase; none: the phase's backend runs no FlashAttention.",
                        number(
                            otherwise(f"max by (phase) ({versions})", -1, phase="all phases"),
                            "{{phase}}",
                        ),
                        mappings=VERSIONS,
                        text=both,
                    ),
                ),
                (
                    4,
                    a_stat(
                        "GPUs",
                        "GPUs that NVML shows, that the server needs, and that are known to be the server's.",
                        *gpus,
                        mappings=unknown,
                        text=both,
                    ),
                ),
            ],
        )
    ]


def _causes() -> list[Band]:
    doubts = f'label_replace(max by (pod, code) ({metric("condition_unknown")}), "severity", "unknown", "", "")'
    for shown in ("meaning", "remedy"):
        doubts = f'label_replace({doubts}, "{shown}", "{UNKNOWN}", "", "")'
    causes = copied(ranked("pod", SERIOUS), "code", "meaning", "remedy")
    nothing = {"code": NOTHING, "severity": "none", "meaning": NOTHING, "remedy": NOTHING}
    table = columns(
        a_table(
            "Cause and remedy",
            "What is wrong, and what to do, in general words; the sidecar's page (linked above) has the exact command "
            "for this replica, the evidence, and what else the cause explains. A code leads to its runbook.",
            now(f"sort_desc({otherwise(f'{causes} or 0 * {doubts}', **nothing)})"),
            tall=True,
        ),
        [
            Column(name="severity", title="Severity", width=85, mappings=SEVERITIES, colored=True),
            Column(name="code", title="Cause", width=240, link=TO_RUNBOOK),
            Column(name="meaning", title="What it means", width=220, mappings=MEANINGS, wrap=True),
            Column(name="remedy", title="What to do", mappings=REMEDIES, wrap=True),
        ],
    )
    was = [
        f"{rank} * (max_over_time({metric('condition_active', severity, window='$__rate_interval')}) == 1)"
        for rank, severity in ((3, 'severity="critical"'), (2, 'severity="warning"'))
    ]
    doubted = f"max_over_time({metric('condition_unknown', window='$__rate_interval')})"
    timeline = a_timeline(
        "Conditions over time",
        "Each condition that was active or could not be judged in the time range.",
        over_time(otherwise(f"max by (code) ({' or '.join([*was, doubted])})", code=NOTHING), "{{code}}"),
        mappings=STATES,
    )
    return [Band(9, [(24, table)], "What is wrong, and what to do"), Band(7, [(24, timeline)])]


def _environment() -> list[Band]:
    known = f"max by (item) ({metric('environment_info')})"
    pins = f"max by (item) ({copied(metric('requirement_satisfied'), 'package', 'item')})"
    table = columns(
        a_table(
            "Environment",
            "What the server runs on, whether it meets SGLang's own requirements, whether it is as the baseline wants "
            "it, and when it last changed under this sidecar's eyes.",
            now(otherwise(f"max by (item, value) ({metric('environment_info')})", item="nothing is known"), "A"),
            now(f"{pins} and on (item) {known}", "B"),
            now(f"max by (item) ({metric('drift')})", "C"),
            now(f"max by (item) ({metric('environment_changes_total')}) and on (item) {known}", "D"),
            now(f"max by (item) ({metric('environment_last_change_timestamp_seconds')}) * 1000", "E"),
            sort=("Item", False),
        ),
        [
            Column(name="item", title="Item"),
            Column(name="value", title="Value", width=135),
            Column(name="Value #B", title="Requirement", width=100, mappings=_SATISFIED, colored=True),
            Column(name="Value #C", title="Baseline", width=80, mappings=_DIFFERS, colored=True),
            Column(name="Value #D", title="Changes", width=75),
            Column(name="Value #E", title="Last change", width=105, unit=TIMESTAMP),
        ],
        joined=[joined_by("item")],
    )
    attention = columns(
        a_table(
            "Attention",
            "The backend of each phase, where it was read, and the FlashAttention implementation that it runs.",
            now(
                otherwise(
                    f"max by (phase, backend, source) ({metric('attention_backend_info')})",
                    phase="nothing is known",
                ),
                "A",
            ),
            now(f"max by (phase) ({metric('flash_attention_version')})", "B"),
            sort=("Phase", False),
        ),
        [
            Column(name="phase", title="Phase"),
            Column(name="backend", title="Backend", width=130),
            Column(name="source", title="Source", width=130),
            Column(name="Value #B", title="FlashAttention", width=110, mappings=VERSIONS, absent="unknown"),
        ],
        joined=[joined_by("phase")],
    )
    modules = columns(
        a_table(
            "Modules",
            "Whether the server's interpreter can import what the backends need, on what evidence, and how long the "
            "last real import took.",
            now(otherwise(f"max by (module) ({metric('module_importable')})", -1, module="nothing is known"), "A"),
            now(f"max by (module) ({metric('module_import_verified')})", "B"),
            now(f"max by (module) ({metric('module_import_duration_seconds')})", "C"),
            sort=("Module", False),
        ),
        [
            Column(name="module", title="Module"),
            Column(name="Value #A", title="Importable", width=90, mappings=YES_NO, colored=True),
            Column(name="Value #B", title="Evidence", width=130, mappings=_EVIDENCE),
            Column(name="Value #C", title="Import took", width=100, unit="s", decimals=1),
        ],
        joined=[joined_by("module")],
    )
    return [Band(14, [(13, table), (11, (attention, modules))], "Environment")]


def _server() -> list[Band]:
    says = columns(
        a_table(
            "The server as it describes itself",
            "From the server's own information over HTTP; an empty cell: it does not say.",
            now(
                otherwise(
                    f"max by (version, mamba_backend, tp_size, device) ({metric('server_info')})",
                    version="nothing is known",
                )
            ),
        ),
        [
            Column(name="version", title="SGLang"),
            Column(name="device", title="Device", width=90),
            Column(name="tp_size", title="Tensor parallel", width=120),
            Column(name="mamba_backend", title="Mamba backend", width=120),
        ],
    )
    processes = a_series(
        "Processes by role",
        "Living processes of the server. A scheduler that is gone while HTTP answers is the condition "
        "server-workers-missing.",
        over_time(otherwise(f"max by (role) ({metric('server_processes')})", role="cannot be seen"), "{{role}}"),
        unit="none",
        decimals=0,
    )
    memory = a_series(
        "Memory by role",
        "Resident memory of the server's processes; memory that they share counts in each.",
        over_time(
            otherwise(f"max by (role) ({metric('server_resident_memory_bytes')})", role="cannot be seen"), "{{role}}"
        ),
        unit="bytes",
    )
    return [Band(7, [(10, says), (7, processes), (7, memory)], "Server")]


def _driver() -> list[Band]:
    driver = columns(
        a_table(
            "Driver",
            "Versions of the GPU driver as NVML and /proc tell them; an empty cell is not known.",
            now(
                otherwise(
                    "max by (driver_version, kernel_module_version, kernel_module, cuda_driver_version, nvml_version) "
                    f"({metric('driver_info')})",
                    driver_version="nothing is known",
                )
            ),
        ),
        [
            Column(name="driver_version", title="Driver"),
            Column(name="kernel_module_version", title="Module", width=110),
            Column(name="kernel_module", title="Kind", width=90),
            Column(name="cuda_driver_version", title="CUDA", width=70),
            Column(name="nvml_version", title="NVML", width=120),
        ],
    )
    nvml = a_stat(
        "NVML",
        "Whether NVML could be opened and asked, and its last return code: 0 is success, 9 no driver, 12 no library, "
        "18 versions differ.",
        number(otherwise(f"max({metric('nvml_up')})", -1), "NVML", "A"),
        number(otherwise(f"max({metric('nvml_return_code')})", -1), "return code", "B"),
        text=shapes.BigValueTextMode.VALUE_AND_NAME,
    )
    nvml.override_by_name("NVML", [models.DynamicConfigValue(id_val="mappings", value=[UP_DOWN])])
    nvml.override_by_name(
        "return code",
        [
            models.DynamicConfigValue(id_val="mappings", value=[mapped({_UNKNOWN: ("unknown", "purple")})]),
            models.DynamicConfigValue(id_val="thresholds", value=steps(*BAD_FROM_ONE).build()),
        ],
    )
    gpus = columns(
        a_table(
            "Each GPU",
            "Each GPU that NVML shows to this sidecar. More in GPU health.",
            now(otherwise(f"max by (gpu, name, uuid) ({metric('gpu_info')})", gpu=NOTHING), "A"),
            now(f"max by (gpu, uuid) ({metric('gpu_up')})", "B"),
            now(f"max by (gpu, uuid) ({USED})", "C"),
            now(f"count by (gpu, uuid) ({metric('gpu_condition_active')})", "D"),
            sort=("GPU", False),
        ),
        [
            Column(name="gpu", title="GPU", width=60),
            Column(name="name", title="Model"),
            Column(name="Value #B", title="Answers", width=80, mappings=YES_NO, colored=True),
            Column(
                name="Value #C",
                title="Memory used",
                width=130,
                unit="percentunit",
                gauge=(0, 1),
                thresholds=((None, "blue"),),
            ),
            Column(name="Value #D", title="Conditions", width=90, thresholds=BAD_FROM_ONE, colored=True),
        ],
        joined=[MERGED],
    )
    return [Band(9, [(10, (driver, nvml)), (14, gpus)], "Driver and GPUs")]


def _sidecar() -> list[Band]:
    runs = f"sum by (probe) (increase({metric('probe_runs_total', FAILED, window='$__range')}))"
    probes = columns(
        a_table(
            "Probes",
            "Whether each probe's last run gave an answer, when one last did, how long the last run took, and how many "
            "failed in this time range. A probe whose question does not arise counts as answered.",
            now(otherwise(f"max by (probe) ({metric('probe_success')})", probe="no probe has run"), "A"),
            now(f"max by (probe) ({metric('probe_last_success_timestamp_seconds')}) * 1000", "B"),
            now(f"max by (probe) ({metric('probe_duration_seconds')})", "C"),
            now(runs, "D"),
            now(f"max by (probe) ({metric('probe_stuck')})", "E"),
            sort=("Probe", False),
        ),
        [
            Column(name="probe", title="Probe"),
            Column(name="Value #A", title="Last run", width=90, mappings=_OUTCOMES, colored=True),
            Column(name="Value #B", title="Last answer", width=150, unit=TIMESTAMP),
            Column(name="Value #C", title="Took", width=80, unit="s", decimals=2),
            Column(name="Value #D", title="Failed", width=70, decimals=0),
            Column(name="Value #E", title="Child", width=70, mappings=_STUCK, colored=True),
        ],
        joined=[joined_by("probe")],
    )
    readiness, conditions = (
        a_series(
            title,
            description,
            over_time(
                otherwise(
                    f"sum by (to) (increase({metric(family, window='$__rate_interval')}))",
                    to="no sidecar answers",
                ),
                "{{to}}",
            ),
            unit="none",
        )
        for title, description, family in (
            (
                "Changes of readiness",
                "How often the verdict changed, by the verdict changed to. Many: something flaps.",
                "ready_transitions_total",
            ),
            (
                "Changes of conditions",
                "How often a condition began or ended. Many while the verdict stays: one that does not gate flaps.",
                "condition_transitions_total",
            ),
        )
    )
    ours = metric("build_info")
    cost = a_series(
        "Memory of the sidecar",
        "Resident memory of the agent's own process.",
        over_time(
            otherwise(
                f"max by (pod) ({select('process_resident_memory_bytes')} and on (instance) {ours})",
                pod="not known",
            ),
            "{{pod}}",
        ),
        unit="bytes",
    )
    about = columns(
        a_table(
            "About the sidecar",
            "Its version and the Python that runs it, whether its baseline could be read, when its certificate ends, "
            "how many of its files for TLS and the token could not be renewed, and whether it shows a demo.",
            now(otherwise(f"max by (pod, version, python_version) ({ours})", pod="no sidecar answers"), "A"),
            now(f"max by (pod) ({metric('baseline_loaded')})", "B"),
            now(f"max by (pod) ({metric('drift_items')})", "C"),
            now(f"max by (pod) ({metric('demo')} or 0 * {metric('ready')})", "D"),
            now(f"max by (pod) ({metric('tls_certificate_not_after_timestamp_seconds')}) * 1000", "E"),
            now(f"sum by (pod) ({metric('access_renewal_failing')})", "F"),
        ),
        [
            Column(name="pod", title="Replica"),
            Column(name="version", title="Version", width=80),
            Column(name="python_version", title="Python", width=80),
            Column(name="Value #B", title="Baseline", width=90, mappings=_BASELINE, absent="not set"),
            Column(name="Value #C", title="Off baseline", width=100, absent="-"),
            Column(name="Value #E", title="Certificate", width=120, unit=TIMESTAMP, absent="no TLS"),
            Column(name="Value #F", title="Not renewed", width=100, decimals=0, absent="-"),
            Column(name="Value #D", title="Shows", width=100, mappings=_DEMO, absent="-"),
        ],
        joined=[joined_by("pod")],
    )
    return [
        Band(12, [(12, probes), (12, (about, cost))], "The sidecar itself"),
        Band(6, [(12, readiness), (12, conditions)]),
    ]


def board() -> models.Dashboard:
    """Build the dashboard."""
    instance = (
        dashboard.QueryVariable("instance")
        .label("Address")
        .description("Where the sidecar's own page is")
        .hide(models.VariableHide.HIDE_VARIABLE)
        .datasource(DATASOURCE)
        .query(f"label_values({metric('build_info')}, instance)")
        .refresh(models.VariableRefresh.ON_TIME_RANGE_CHANGED)
    )
    page = (
        dashboard.DashboardLink("This sidecar's page")
        .type(models.DashboardLinkType.LINK)
        .icon("external link")
        .url("http://${instance}/")
        .target_blank(True)
        .tooltip(
            "Exact commands and evidence. Where your browser cannot reach pods: kubectl port-forward POD 9477, then "
            "http://localhost:9477"
        )
    )
    changed = metric("environment_last_change_timestamp_seconds")
    started = metric("server_start_time_seconds")
    return assemble(
        SERVER,
        "One replica: its verdict, the cause and what to do, what it runs on, and how that changed.",
        [*_strip(), *_causes(), *_environment(), *_server(), *_driver(), *_sidecar()],
        chosen=[*variables(single=True), instance],
        links=[page],
        annotations=[
            Annotation(
                "Changes",
                f"max by (pod, item) ({changed}) * 1000 >= $__from",
                color="blue",
                title="{{item}} changed",
                text="on {{pod}}",
                value_is_time=True,
            ),
            Annotation(
                "Starts of the server",
                f"max by (pod) ({started}) * 1000 >= $__from",
                color="green",
                title="The server started",
                text="on {{pod}}",
                value_is_time=True,
            ),
        ],
    )
