/*
 * A libnvidia-ml.so.1 without a GPU: what it answers is read from a scenario file, again whenever that file
 * changed, so that a test can change it under a running process. The file (path in FAKE_NVML_SCENARIO) has
 * lines key=value:
 *
 *   gpus=8                        any property below, for all GPUs; name@3=... for GPU 3 only
 *   profile=a100                  the model that gives every property its default: h200 (the default; recorded
 *                                 on a real machine with two), h100, a100, b200, rtx4090 (public data sheets)
 *   nvmlDeviceGetCount=9          a call's behaviour, see below
 *   nvmlDeviceGetMemoryInfo@3=4   the same for GPU 3 only
 *   driver_generation=1           another number than at nvmlInit: every call of that session fails with 999,
 *                                 as after the driver was loaded anew, until the session is opened again
 *   xid@3=79 and xid_sequence=1   an Xid event (or several: 79,48) of GPU 3; it is queued once, when the number
 *                                 becomes another than it was when the event set was made or last waited for
 *
 * A behaviour is a return code, "hang", "abort", "slow:MILLISECONDS", or one that counts the calls of this
 * process since the line took effect: "after:N:B" works N times and then behaves as B says, "until:N:B" behaves
 * as B says N times and then works. N@3 and the plain form count together.
 *
 * Properties: driver_version nvml_version cuda_driver_version; uuid name compute_capability (90 is 9.0) memory_total
 * memory_reserved memory_used temperature power utilization mig mig_devices ecc_corrected ecc_uncorrected
 * remapped_correctable remapped_uncorrectable remap_pending remap_failed recovery_action clocks_event_reasons
 * nvlink_kib pcie_generation pcie_width pcie_generation_max pcie_width_max nvlinks nvlinks_down (that many of them,
 * from 0) fabric_state (-1: the GPU knows of no fabric) fabric_status virtualization licensed, and
 * recovery_action_code, the return code of that one field value.
 *
 * Calls are named without _v2, _v3, _v4, V or WithFlags: nvmlInit stands for all its forms.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

typedef int nvmlReturn_t;
typedef void *nvmlDevice_t;
typedef void *nvmlEventSet_t;
typedef unsigned long long u64;
typedef struct { u64 total, free, used; } nvmlMemory_t;
typedef struct { unsigned int version; u64 total, reserved, free, used; } nvmlMemory_v2_t;
typedef struct { unsigned int gpu, memory; } nvmlUtilization_t;
typedef struct {
    char busIdLegacy[16];
    unsigned int domain, bus, device, pciDeviceId, pciSubSystemId;
    char busId[32];
} nvmlPciInfo_t;
typedef struct {
    unsigned int fieldId, scopeId;
    long long timestamp, latencyUsec;
    unsigned int valueType;
    nvmlReturn_t nvmlReturn;
    union { double d; unsigned int ui; u64 ull; } value;
} nvmlFieldValue_t;
typedef struct { unsigned char clusterUuid[16]; nvmlReturn_t status; unsigned int cliqueId; unsigned char state; }
    nvmlGpuFabricInfo_t;
typedef struct {
    unsigned int version;
    unsigned char clusterUuid[16];
    nvmlReturn_t status;
    unsigned int cliqueId;
    unsigned char state;
    unsigned int healthMask;
} nvmlGpuFabricInfoV_t;
typedef struct {
    nvmlDevice_t device;
    u64 eventType, eventData;
    unsigned int gpuInstanceId, computeInstanceId;
} nvmlEventData_t;
typedef struct {
    unsigned int featureCode, featureState;
    char licenseInfo[128], productName[128];
    unsigned int featureEnabled;
    struct { unsigned int year; unsigned short month, day, hour, min, sec; unsigned char status; } licenseExpiry;
} feature_t;
typedef struct { int isGridLicenseSupported; unsigned int licensableFeaturesCount; feature_t features[3]; } features_t;

enum {
    SUCCESS = 0, UNINITIALIZED = 1, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6, INSUFFICIENT_SIZE = 7,
    TIMEOUT = 10, FUNCTION_NOT_FOUND = 13, VERSION_MISMATCH = 25, UNKNOWN = 999
};
enum { MAX_GPUS = 16, MAX_MIG = 7, XID_CRITICAL_ERROR = 8, RECOVERY_ACTION = 230, UNSIGNED_INT = 1 };
enum { NVLINK_LINK_COUNT = 91, NVLINK_THROUGHPUT_DATA_TX = 138, NVLINK_THROUGHPUT_DATA_RX = 139, UNSIGNED_LONG_LONG = 3 };

typedef struct {
    const char *key, *name;
    int capability, generation, nvlinks, fabric, power;
    u64 total, reserved;
    int datacenter; /* has MIG, ECC, row remapping */
} profile_t;

static const profile_t PROFILES[] = {
    {"h200", "NVIDIA H200", 90, 5, 18, 3, 78786, 150754820096ULL, 644939776ULL, 1},
    {"h100", "NVIDIA H100 80GB HBM3", 90, 5, 18, 3, 71000, 85520809984ULL, 600000000ULL, 1},
    {"a100", "NVIDIA A100-SXM4-80GB", 80, 4, 12, -1, 62000, 85899345920ULL, 600000000ULL, 1},
    {"b200", "NVIDIA B200", 100, 5, 18, 3, 140000, 192265846784ULL, 700000000ULL, 1},
    {"rtx4090", "NVIDIA GeForce RTX 4090", 89, 4, 0, -1, 22000, 25757220864ULL, 450000000ULL, 0},
};

static int sessions;
static u64 generation; /* of the driver, when the session was opened */

/* -- the scenario ------------------------------------------------------------------------------- */

static char scenario[65536];

/* Read the scenario if its file changed since. Every call begins with this. */
static void load(void)
{
    static struct stat last;
    struct stat now;
    const char *path = getenv("FAKE_NVML_SCENARIO");
    FILE *file;
    if (!path || stat(path, &now) != 0) {
        scenario[0] = '\0';
        memset(&last, 0, sizeof last);
        return;
    }
    if (now.st_ino == last.st_ino && now.st_mtim.tv_sec == last.st_mtim.tv_sec &&
        now.st_mtim.tv_nsec == last.st_mtim.tv_nsec && now.st_size == last.st_size)
        return;
    if ((file = fopen(path, "rb"))) {
        scenario[fread(scenario, 1, sizeof scenario - 1, file)] = '\0';
        fclose(file);
        last = now;
    }
}

/* The value of a key in the scenario, or NULL. Valid until the next lookup. */
static const char *lookup(const char *key)
{
    static char value[4096];
    size_t length = strlen(key), size;
    for (const char *line = scenario; *line; line += strcspn(line, "\n"), line += *line == '\n') {
        if (strncmp(line, key, length) != 0 || line[length] != '=')
            continue;
        line += length + 1;
        size = strcspn(line, "\n");
        size = size < sizeof value ? size : sizeof value - 1;
        memcpy(value, line, size);
        value[size] = '\0';
        return value;
    }
    return NULL;
}

/* The value of key@gpu, else of key, else NULL. */
static const char *lookup_for(const char *key, int gpu)
{
    char specific[256];
    const char *value = NULL;
    if (gpu >= 0) {
        snprintf(specific, sizeof specific, "%s@%d", key, gpu);
        value = lookup(specific);
    }
    return value ? value : lookup(key);
}

static u64 number(const char *key, int gpu, u64 otherwise)
{
    const char *value = lookup_for(key, gpu);
    return value ? strtoull(value, NULL, 10) : otherwise;
}

static nvmlReturn_t text(const char *key, int gpu, const char *otherwise, char *out, unsigned int size)
{
    const char *value = lookup_for(key, gpu);
    value = value ? value : otherwise;
    if (strlen(value) >= size)
        return INSUFFICIENT_SIZE;
    strcpy(out, value);
    return SUCCESS;
}

static const profile_t *profile(int gpu)
{
    const char *key = lookup_for("profile", gpu);
    for (size_t i = 0; key && i < sizeof PROFILES / sizeof *PROFILES; i++)
        if (strcmp(PROFILES[i].key, key) == 0)
            return &PROFILES[i];
    return PROFILES;
}

static int count(void)
{
    int gpus = (int)number("gpus", -1, 2);
    return gpus < MAX_GPUS ? gpus : MAX_GPUS;
}

/* How often this call on this GPU was made while its behaviour was what it is now, this time included. */
static unsigned int times(const char *call, int gpu, const char *behaviour)
{
    static struct { char call[64], behaviour[64]; int gpu; unsigned int n; } calls[512];
    size_t i = 0;
    while (i < sizeof calls / sizeof *calls - 1 && calls[i].n && (calls[i].gpu != gpu || strcmp(calls[i].call, call)))
        i++;
    if (strcmp(calls[i].behaviour, behaviour) != 0)
        calls[i].n = 0;
    calls[i].gpu = gpu;
    snprintf(calls[i].call, sizeof calls[i].call, "%s", call);
    snprintf(calls[i].behaviour, sizeof calls[i].behaviour, "%s", behaviour);
    return ++calls[i].n;
}

/* What the scenario wants of this call: does not return for a hang, else the return code. */
static nvmlReturn_t behave(const char *call, int gpu)
{
    const char *value;
    char *rest;
    unsigned long n;
    int after;
    load();
    value = lookup_for(call, gpu);
    if (!value)
        return SUCCESS;
    after = strncmp(value, "after:", 6) == 0;
    if (after || strncmp(value, "until:", 6) == 0) {
        n = strtoul(value + 6, &rest, 10);
        if ((times(call, gpu, value) > n) != after)
            return SUCCESS;
        value = rest + (*rest == ':');
    }
    if (strcmp(value, "hang") == 0)
        for (;;)
            pause();
    if (strcmp(value, "abort") == 0)
        abort();
    if (strncmp(value, "slow:", 5) == 0) {
        usleep((useconds_t)atoi(value + 5) * 1000);
        return SUCCESS;
    }
    return atoi(value);
}

/* -- handles: a GPU is its index + 1, a MIG device of it carries its own index + 1 above ----------- */

static nvmlDevice_t handle_of(int gpu, int mig) { return (nvmlDevice_t)((size_t)(gpu + 1) | (size_t)(mig + 1) << 16); }
static int index_of(nvmlDevice_t device) { return (int)((size_t)device & 0xffff) - 1; }
static int mig_of(nvmlDevice_t device) { return (int)((size_t)device >> 16) - 1; }

#define TRY(expression) do { nvmlReturn_t code_ = (expression); if (code_ != SUCCESS) return code_; } while (0)

static nvmlReturn_t session(void)
{
    load();
    if (!sessions)
        return UNINITIALIZED;
    return number("driver_generation", -1, 0) == generation ? SUCCESS : UNKNOWN;
}

static nvmlReturn_t enter(const char *call)
{
    TRY(session());
    return behave(call, -1);
}

static nvmlReturn_t enter_gpu(const char *call, nvmlDevice_t device)
{
    int gpu = index_of(device);
    TRY(session());
    return gpu < 0 || gpu >= count() ? INVALID_ARGUMENT : behave(call, gpu);
}

/* As enter_gpu, for what only GPUs for data centres have. */
static nvmlReturn_t enter_datacenter(const char *call, nvmlDevice_t device)
{
    TRY(enter_gpu(call, device));
    return profile(index_of(device))->datacenter ? SUCCESS : NOT_SUPPORTED;
}

/* -- the session -------------------------------------------------------------------------------- */

nvmlReturn_t nvmlInit_v2(void)
{
    TRY(behave("nvmlInit", -1));
    if (sessions++ == 0)
        generation = number("driver_generation", -1, 0);
    return SUCCESS;
}
nvmlReturn_t nvmlInit(void) { return nvmlInit_v2(); }
nvmlReturn_t nvmlInitWithFlags(unsigned int flags) { (void)flags; return nvmlInit_v2(); }

nvmlReturn_t nvmlShutdown(void)
{
    if (!sessions)
        return UNINITIALIZED;
    TRY(behave("nvmlShutdown", -1));
    sessions--;
    return SUCCESS;
}

const char *nvmlErrorString(nvmlReturn_t code)
{
    static char words[64];
    snprintf(words, sizeof words, "Fake Error %d", code);
    return words;
}

nvmlReturn_t nvmlSystemGetDriverVersion(char *out, unsigned int size)
{
    TRY(enter("nvmlSystemGetDriverVersion"));
    return text("driver_version", -1, "580.159.04", out, size);
}
nvmlReturn_t nvmlSystemGetNVMLVersion(char *out, unsigned int size)
{
    TRY(behave("nvmlSystemGetNVMLVersion", -1)); /* the real one needs no session either */
    return text("nvml_version", -1, "13.580.159.04", out, size);
}
nvmlReturn_t nvmlSystemGetCudaDriverVersion_v2(int *out)
{
    TRY(enter("nvmlSystemGetCudaDriverVersion"));
    *out = (int)number("cuda_driver_version", -1, 13000);
    return SUCCESS;
}
nvmlReturn_t nvmlSystemGetCudaDriverVersion(int *out) { return nvmlSystemGetCudaDriverVersion_v2(out); }

nvmlReturn_t nvmlDeviceGetCount_v2(unsigned int *out)
{
    TRY(enter("nvmlDeviceGetCount"));
    *out = (unsigned int)count();
    return SUCCESS;
}
nvmlReturn_t nvmlDeviceGetCount(unsigned int *out) { return nvmlDeviceGetCount_v2(out); }

nvmlReturn_t nvmlDeviceGetHandleByIndex_v2(unsigned int index, nvmlDevice_t *out)
{
    TRY(enter_gpu("nvmlDeviceGetHandleByIndex", handle_of((int)index, -1)));
    *out = handle_of((int)index, -1);
    return SUCCESS;
}
nvmlReturn_t nvmlDeviceGetHandleByIndex(unsigned i, nvmlDevice_t *out) { return nvmlDeviceGetHandleByIndex_v2(i, out); }

/* -- what a GPU is ------------------------------------------------------------------------------ */

nvmlReturn_t nvmlDeviceGetUUID(nvmlDevice_t device, char *out, unsigned int size)
{
    char uuid[64];
    int gpu = index_of(device), mig = mig_of(device);
    TRY(enter_gpu("nvmlDeviceGetUUID", device));
    if (mig >= 0)
        return snprintf(out, size, "MIG-00000000-0000-4000-8000-%06d%06d", gpu, mig) < (int)size ? SUCCESS : UNKNOWN;
    snprintf(uuid, sizeof uuid, "GPU-00000000-0000-4000-8000-%012d", gpu);
    return text("uuid", gpu, uuid, out, size);
}
nvmlReturn_t nvmlDeviceGetName(nvmlDevice_t device, char *out, unsigned int size)
{
    TRY(enter_gpu("nvmlDeviceGetName", device));
    TRY(text("name", index_of(device), profile(index_of(device))->name, out, size));
    if (mig_of(device) >= 0)
        strncat(out, " MIG 1g.18gb", size - strlen(out) - 1);
    return SUCCESS;
}
nvmlReturn_t nvmlDeviceGetCudaComputeCapability(nvmlDevice_t device, int *major, int *minor)
{
    int capability;
    TRY(enter_gpu("nvmlDeviceGetCudaComputeCapability", device));
    capability = (int)number("compute_capability", index_of(device), (u64)profile(index_of(device))->capability);
    *major = capability / 10;
    *minor = capability % 10;
    return SUCCESS;
}
nvmlReturn_t nvmlDeviceGetPciInfo_v3(nvmlDevice_t device, nvmlPciInfo_t *out)
{
    TRY(enter_gpu("nvmlDeviceGetPciInfo", device));
    memset(out, 0, sizeof *out);
    out->device = (unsigned int)index_of(device) + 6;
    snprintf(out->busId, sizeof out->busId, "00000000:00:%02X.0", out->device);
    snprintf(out->busIdLegacy, sizeof out->busIdLegacy, "0000:00:%02X.0", out->device);
    return SUCCESS;
}
nvmlReturn_t nvmlDeviceGetPciInfo(nvmlDevice_t device, nvmlPciInfo_t *out)
{
    return nvmlDeviceGetPciInfo_v3(device, out);
}

/* -- what a GPU does ---------------------------------------------------------------------------- */

/* As on the recorded machine: idle, but with what the driver reserves, which only the plain form calls used. */
static void memory(nvmlDevice_t device, nvmlMemory_v2_t *out)
{
    int gpu = index_of(device);
    out->total = number("memory_total", gpu, profile(gpu)->total);
    out->reserved = number("memory_reserved", gpu, profile(gpu)->reserved);
    out->used = number("memory_used", gpu, 0);
    out->free = out->total - out->reserved - out->used;
}
nvmlReturn_t nvmlDeviceGetMemoryInfo(nvmlDevice_t device, nvmlMemory_t *out)
{
    nvmlMemory_v2_t all;
    TRY(enter_gpu("nvmlDeviceGetMemoryInfo", device));
    memory(device, &all);
    out->total = all.total;
    out->used = all.used + all.reserved;
    out->free = all.free;
    return SUCCESS;
}
nvmlReturn_t nvmlDeviceGetMemoryInfo_v2(nvmlDevice_t device, nvmlMemory_v2_t *out)
{
    TRY(enter_gpu("nvmlDeviceGetMemoryInfo", device));
    memory(device, out);
    return SUCCESS;
}
nvmlReturn_t nvmlDeviceGetUtilizationRates(nvmlDevice_t device, nvmlUtilization_t *out)
{
    TRY(enter_gpu("nvmlDeviceGetUtilizationRates", device));
    out->gpu = (unsigned int)number("utilization", index_of(device), 0);
    out->memory = 0;
    return SUCCESS;
}
nvmlReturn_t nvmlDeviceGetTemperature(nvmlDevice_t device, int sensor, unsigned int *out)
{
    (void)sensor;
    TRY(enter_gpu("nvmlDeviceGetTemperature", device));
    *out = (unsigned int)number("temperature", index_of(device), index_of(device) == 0 ? 38 : 37);
    return SUCCESS;
}
nvmlReturn_t nvmlDeviceGetTotalEccErrors(nvmlDevice_t device, int type, int counter, u64 *out)
{
    TRY(enter_datacenter("nvmlDeviceGetTotalEccErrors", device));
    *out = counter == 0 ? number(type == 0 ? "ecc_corrected" : "ecc_uncorrected", index_of(device), 0) : 0;
    return SUCCESS;
}
nvmlReturn_t nvmlDeviceGetRemappedRows(nvmlDevice_t device, unsigned int *correctable, unsigned int *uncorrectable,
                                       unsigned int *pending, unsigned int *failed)
{
    int gpu = index_of(device);
    TRY(enter_datacenter("nvmlDeviceGetRemappedRows", device));
    *correctable = (unsigned int)number("remapped_correctable", gpu, 0);
    *uncorrectable = (unsigned int)number("remapped_uncorrectable", gpu, 0);
    *pending = (unsigned int)number("remap_pending", gpu, 0);
    *failed = (unsigned int)number("remap_failed", gpu, 0);
    return SUCCESS;
}
nvmlReturn_t nvmlDeviceGetFieldValues(nvmlDevice_t device, int fields, nvmlFieldValue_t *out)
{
    int gpu = index_of(device);
    u64 nvlinks;
    struct timespec now;
    TRY(enter_gpu("nvmlDeviceGetFieldValues", device));
    nvlinks = number("nvlinks", gpu, (u64)profile(gpu)->nvlinks);
    for (int i = 0; i < fields; i++) {
        out[i].nvmlReturn = SUCCESS;
        out[i].valueType = UNSIGNED_INT;
        out[i].value.ull = 0;
        switch (out[i].fieldId) {
        case RECOVERY_ACTION:
            out[i].nvmlReturn = behave("recovery_action_code", gpu);
            out[i].value.ui = (unsigned int)number("recovery_action", gpu, 0);
            break;
        case NVLINK_LINK_COUNT:
            out[i].value.ui = (unsigned int)nvlinks;
            break;
        case NVLINK_THROUGHPUT_DATA_TX:
        case NVLINK_THROUGHPUT_DATA_RX:
            out[i].nvmlReturn = out[i].scopeId < nvlinks ? SUCCESS : NOT_SUPPORTED;
            out[i].valueType = UNSIGNED_LONG_LONG;
            clock_gettime(CLOCK_REALTIME, &now);
            out[i].timestamp = now.tv_sec * 1000000LL + now.tv_nsec / 1000;
            out[i].value.ull = number("nvlink_kib", gpu, 1);
            break;
        default:
            out[i].nvmlReturn = INVALID_ARGUMENT;
        }
    }
    return SUCCESS;
}

/* Calls that give one unsigned number. GPU and its profile are known to the expression as gpu and p. */
#define NUMBER(name, call, type, key, otherwise) \
    nvmlReturn_t name(nvmlDevice_t device, type *out) \
    { \
        int gpu = index_of(device); \
        TRY(enter_gpu(call, device)); \
        const profile_t *p __attribute__((unused)) = profile(gpu); \
        *out = (type)number(key, gpu, (u64)(otherwise)); \
        return SUCCESS; \
    }
NUMBER(nvmlDeviceGetPowerUsage, "nvmlDeviceGetPowerUsage", unsigned int, "power", gpu ? p->power + 2672 : p->power)
/* As on the recorded machine: idle. */
NUMBER(nvmlDeviceGetCurrentClocksEventReasons, "nvmlDeviceGetCurrentClocksEventReasons", u64, "clocks_event_reasons", 1)
NUMBER(nvmlDeviceGetCurrentClocksThrottleReasons, "nvmlDeviceGetCurrentClocksThrottleReasons", u64,
       "clocks_event_reasons", 1)
NUMBER(nvmlDeviceGetCurrPcieLinkGeneration, "nvmlDeviceGetCurrPcieLinkGeneration", unsigned int, "pcie_generation",
       number("pcie_generation_max", gpu, (u64)p->generation))
NUMBER(nvmlDeviceGetMaxPcieLinkGeneration, "nvmlDeviceGetMaxPcieLinkGeneration", unsigned int, "pcie_generation_max",
       p->generation)
NUMBER(nvmlDeviceGetCurrPcieLinkWidth, "nvmlDeviceGetCurrPcieLinkWidth", unsigned int, "pcie_width",
       number("pcie_width_max", gpu, 16))
NUMBER(nvmlDeviceGetMaxPcieLinkWidth, "nvmlDeviceGetMaxPcieLinkWidth", unsigned int, "pcie_width_max", 16)
NUMBER(nvmlDeviceGetVirtualizationMode, "nvmlDeviceGetVirtualizationMode", unsigned int, "virtualization", 1)

/* -- NVLink and fabric -------------------------------------------------------------------------- */

nvmlReturn_t nvmlDeviceGetNvLinkState(nvmlDevice_t device, unsigned int link, unsigned int *out)
{
    int gpu = index_of(device);
    TRY(enter_gpu("nvmlDeviceGetNvLinkState", device));
    if (link >= 18)
        return INVALID_ARGUMENT;
    if (link >= number("nvlinks", gpu, (u64)profile(gpu)->nvlinks))
        return NOT_SUPPORTED;
    *out = link >= number("nvlinks_down", gpu, 0);
    return SUCCESS;
}

static nvmlReturn_t fabric(nvmlDevice_t device, unsigned char *state, nvmlReturn_t *status)
{
    int gpu = index_of(device);
    const char *wanted;
    TRY(enter_gpu("nvmlDeviceGetGpuFabricInfo", device));
    wanted = lookup_for("fabric_state", gpu);
    if ((wanted ? atoi(wanted) : profile(gpu)->fabric) < 0)
        return NOT_SUPPORTED;
    *state = (unsigned char)(wanted ? atoi(wanted) : profile(gpu)->fabric);
    *status = (nvmlReturn_t)number("fabric_status", gpu, 0);
    return SUCCESS;
}
nvmlReturn_t nvmlDeviceGetGpuFabricInfo(nvmlDevice_t device, nvmlGpuFabricInfo_t *out)
{
    return fabric(device, &out->state, &out->status);
}
nvmlReturn_t nvmlDeviceGetGpuFabricInfoV(nvmlDevice_t device, nvmlGpuFabricInfoV_t *out)
{
    if (out->version != (sizeof *out | 2u << 24))
        return VERSION_MISMATCH;
    return fabric(device, &out->state, &out->status);
}

/* -- MIG and vGPU ------------------------------------------------------------------------------- */

nvmlReturn_t nvmlDeviceGetMigMode(nvmlDevice_t device, unsigned int *current, unsigned int *pending)
{
    TRY(enter_datacenter("nvmlDeviceGetMigMode", device));
    *current = *pending = (unsigned int)number("mig", index_of(device), 0);
    return SUCCESS;
}
nvmlReturn_t nvmlDeviceGetMaxMigDeviceCount(nvmlDevice_t device, unsigned int *out)
{
    TRY(enter_datacenter("nvmlDeviceGetMaxMigDeviceCount", device));
    *out = number("mig", index_of(device), 0) ? MAX_MIG : 0;
    return SUCCESS;
}
nvmlReturn_t nvmlDeviceGetMigDeviceHandleByIndex(nvmlDevice_t device, unsigned int index, nvmlDevice_t *out)
{
    TRY(enter_datacenter("nvmlDeviceGetMigDeviceHandleByIndex", device));
    /* Numbers of MIG devices have gaps: the first is free here, so that none may stop at it. */
    if (index < 1 || index > number("mig_devices", index_of(device), 0))
        return NOT_FOUND;
    *out = handle_of(index_of(device), (int)index);
    return SUCCESS;
}
nvmlReturn_t nvmlDeviceGetGridLicensableFeatures_v4(nvmlDevice_t device, features_t *out)
{
    TRY(enter_gpu("nvmlDeviceGetGridLicensableFeatures", device));
    memset(out, 0, sizeof *out);
    out->isGridLicenseSupported = 1;
    out->licensableFeaturesCount = 1;
    out->features[0].featureCode = 1;
    out->features[0].featureEnabled = 1;
    out->features[0].featureState = (unsigned int)number("licensed", index_of(device), 1);
    return SUCCESS;
}

/* -- what other programs ask, which the benchmarks run beside the agent --------------------------- */

NUMBER(nvmlDeviceGetPowerManagementLimit, "nvmlDeviceGetPowerManagementLimit", unsigned int, "power_limit", 700000)
nvmlReturn_t nvmlDeviceGetClockInfo(nvmlDevice_t device, int type, unsigned int *out)
{
    TRY(enter_gpu("nvmlDeviceGetClockInfo", device));
    *out = type == 2 /* memory */ ? 3201 : 345;
    return SUCCESS;
}
nvmlReturn_t nvmlDeviceGetFanSpeed(nvmlDevice_t device, unsigned int *out)
{
    (void)out;
    TRY(enter_gpu("nvmlDeviceGetFanSpeed", device));
    return NOT_SUPPORTED; /* the fans are the chassis' */
}
nvmlReturn_t nvmlDeviceGetPcieThroughput(nvmlDevice_t device, int counter, unsigned int *out)
{
    (void)counter;
    TRY(enter_gpu("nvmlDeviceGetPcieThroughput", device));
    *out = 1;
    return SUCCESS;
}
#define CODEC(name) \
    nvmlReturn_t name(nvmlDevice_t device, unsigned int *out, unsigned int *period) \
    { \
        TRY(enter_gpu(#name, device)); \
        *out = 0; \
        *period = 167000; \
        return SUCCESS; \
    }
CODEC(nvmlDeviceGetEncoderUtilization)
CODEC(nvmlDeviceGetDecoderUtilization)
/* Also on a real machine the list is empty for whoever asks from another container. */
#define PROCESSES(name) \
    nvmlReturn_t name##_v3(nvmlDevice_t device, unsigned int *count, void *out) \
    { \
        (void)out; \
        TRY(enter_gpu(#name, device)); \
        *count = 0; \
        return SUCCESS; \
    } \
    nvmlReturn_t name##_v2(nvmlDevice_t device, unsigned int *count, void *out) { return name##_v3(device, count, out); }
PROCESSES(nvmlDeviceGetComputeRunningProcesses)
PROCESSES(nvmlDeviceGetGraphicsRunningProcesses)

/* -- events ------------------------------------------------------------------------------------- */

static struct { u64 sequence; int watched[MAX_GPUS]; nvmlEventData_t queue[256]; int first, last; } events;

nvmlReturn_t nvmlEventSetCreate(nvmlEventSet_t *out)
{
    TRY(enter("nvmlEventSetCreate"));
    memset(&events, 0, sizeof events);
    events.sequence = number("xid_sequence", -1, 0);
    *out = &events;
    return SUCCESS;
}
nvmlReturn_t nvmlEventSetFree(nvmlEventSet_t set) { (void)set; return enter("nvmlEventSetFree"); }
nvmlReturn_t nvmlDeviceRegisterEvents(nvmlDevice_t device, u64 types, nvmlEventSet_t set)
{
    (void)set;
    TRY(enter_gpu("nvmlDeviceRegisterEvents", device));
    events.watched[index_of(device)] = types == XID_CRITICAL_ERROR;
    return SUCCESS;
}
/* Queue what the scenario says happened, if its sequence number is another one than before. */
static void gather(void)
{
    u64 sequence = number("xid_sequence", -1, 0);
    if (sequence == events.sequence)
        return;
    events.sequence = sequence;
    for (int gpu = 0; gpu < count(); gpu++) {
        char key[16], list[256] = "", *at = list;
        snprintf(key, sizeof key, "xid@%d", gpu);
        if (!events.watched[gpu] || !lookup(key))
            continue;
        snprintf(list, sizeof list, "%s", lookup(key));
        for (; *at && events.last < 256; at += strcspn(at, ","), at += *at == ',') {
            nvmlEventData_t *event = &events.queue[events.last++];
            memset(event, 0, sizeof *event);
            event->device = handle_of(gpu, -1);
            event->eventType = XID_CRITICAL_ERROR;
            event->eventData = strtoull(at, NULL, 10);
        }
    }
}
nvmlReturn_t nvmlEventSetWait_v2(nvmlEventSet_t set, nvmlEventData_t *out, unsigned int timeout)
{
    (void)set;
    TRY(enter("nvmlEventSetWait"));
    gather();
    if (events.first == events.last) {
        events.first = events.last = 0;
        usleep((useconds_t)timeout * 1000);
        return TIMEOUT;
    }
    *out = events.queue[events.first++];
    return SUCCESS;
}
nvmlReturn_t nvmlEventSetWait(nvmlEventSet_t set, nvmlEventData_t *out, unsigned int timeout)
{
    return nvmlEventSetWait_v2(set, out, timeout);
}
