/*
 * A libnvidia-ml.so.1 without a GPU: what it answers is read from a scenario file on every call, so that a
 * test can change it under a running process. The file (path in FAKE_NVML_SCENARIO) has lines key=value:
 *
 *   gpus=8                        any property below, for all GPUs; name@3=... for GPU 3 only
 *   nvmlDeviceGetCount=9          a call's behaviour: a return code, "hang", "abort", or "slow:MILLISECONDS"
 *   nvmlDeviceGetMemoryInfo@3=4   the same for GPU 3 only
 *   driver_generation=1           another number than at nvmlInit: every call of that session fails with 999,
 *                                 as after the driver was loaded anew, until the session is opened again
 *
 * Calls are named without _v2, _v3 or WithFlags: nvmlInit stands for all its forms.
 * Without a file: two H200 as recorded on a real machine.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

typedef int nvmlReturn_t;
typedef void *nvmlDevice_t;
typedef struct { unsigned long long total, free, used; } nvmlMemory_t;
typedef struct { unsigned int version; unsigned long long total, reserved, free, used; } nvmlMemory_v2_t;
typedef struct { unsigned int gpu, memory; } nvmlUtilization_t;
typedef struct {
    char busIdLegacy[16];
    unsigned int domain, bus, device, pciDeviceId, pciSubSystemId;
    char busId[32];
} nvmlPciInfo_t;

enum { SUCCESS = 0, UNINITIALIZED = 1, INVALID_ARGUMENT = 2, INSUFFICIENT_SIZE = 7, UNKNOWN = 999 };

static int sessions;
static unsigned long long generation; /* of the driver, when the session was opened */

/* The value of a key in the scenario, or NULL. Valid until the next call. */
static const char *lookup(const char *key)
{
    static char line[4096];
    const char *path = getenv("FAKE_NVML_SCENARIO");
    FILE *file = path ? fopen(path, "rb") : NULL;
    const char *value = NULL;
    size_t length = strlen(key);
    if (!file)
        return NULL;
    while (!value && fgets(line, sizeof line, file)) {
        line[strcspn(line, "\n")] = '\0';
        if (strncmp(line, key, length) == 0 && line[length] == '=')
            value = line + length + 1;
    }
    fclose(file);
    return value;
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

static unsigned long long number(const char *key, int gpu, unsigned long long otherwise)
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

static int count(void) { return (int)number("gpus", -1, 2); }

/* What the scenario wants of this call: does not return for a hang, else the return code. */
static nvmlReturn_t behave(const char *call, int gpu)
{
    const char *value = lookup_for(call, gpu);
    if (!value)
        return SUCCESS;
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

static nvmlReturn_t session(void)
{
    if (!sessions)
        return UNINITIALIZED;
    return number("driver_generation", -1, 0) == generation ? SUCCESS : UNKNOWN;
}

static int index_of(nvmlDevice_t device) { return (int)(size_t)device - 1; }

#define TRY(expression) do { nvmlReturn_t code_ = (expression); if (code_ != SUCCESS) return code_; } while (0)

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
    TRY(enter_gpu("nvmlDeviceGetHandleByIndex", (nvmlDevice_t)(size_t)(index + 1)));
    *out = (nvmlDevice_t)(size_t)(index + 1);
    return SUCCESS;
}
nvmlReturn_t nvmlDeviceGetHandleByIndex(unsigned int index, nvmlDevice_t *out)
{
    return nvmlDeviceGetHandleByIndex_v2(index, out);
}

nvmlReturn_t nvmlDeviceGetUUID(nvmlDevice_t device, char *out, unsigned int size)
{
    char uuid[64];
    TRY(enter_gpu("nvmlDeviceGetUUID", device));
    snprintf(uuid, sizeof uuid, "GPU-00000000-0000-4000-8000-%012d", index_of(device));
    return text("uuid", index_of(device), uuid, out, size);
}
nvmlReturn_t nvmlDeviceGetName(nvmlDevice_t device, char *out, unsigned int size)
{
    TRY(enter_gpu("nvmlDeviceGetName", device));
    return text("name", index_of(device), "NVIDIA H200", out, size);
}
/* As on the recorded machine: idle, but with what the driver reserves, which only the plain form calls used. */
static void memory(nvmlDevice_t device, nvmlMemory_v2_t *out)
{
    out->total = number("memory_total", index_of(device), 150754820096ULL);
    out->reserved = number("memory_reserved", index_of(device), 644939776ULL);
    out->used = number("memory_used", index_of(device), 0);
    out->free = out->total - out->reserved - out->used;
}
nvmlReturn_t nvmlDeviceGetMemoryInfo(nvmlDevice_t device, nvmlMemory_t *out)
{
    TRY(enter_gpu("nvmlDeviceGetMemoryInfo", device));
    nvmlMemory_v2_t all;
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
nvmlReturn_t nvmlDeviceGetTemperature(nvmlDevice_t device, int sensor, unsigned int *out)
{
    (void)sensor;
    TRY(enter_gpu("nvmlDeviceGetTemperature", device));
    *out = (unsigned int)number("temperature", index_of(device), index_of(device) == 0 ? 38 : 37);
    return SUCCESS;
}
nvmlReturn_t nvmlDeviceGetPowerUsage(nvmlDevice_t device, unsigned int *out)
{
    TRY(enter_gpu("nvmlDeviceGetPowerUsage", device));
    *out = (unsigned int)number("power", index_of(device), index_of(device) == 0 ? 78786 : 81458);
    return SUCCESS;
}
nvmlReturn_t nvmlDeviceGetUtilizationRates(nvmlDevice_t device, nvmlUtilization_t *out)
{
    TRY(enter_gpu("nvmlDeviceGetUtilizationRates", device));
    out->gpu = (unsigned int)number("utilization", index_of(device), 0);
    out->memory = 0;
    return SUCCESS;
}
nvmlReturn_t nvmlDeviceGetCudaComputeCapability(nvmlDevice_t device, int *major, int *minor)
{
    int capability; /* 90 is 9.0 */
    TRY(enter_gpu("nvmlDeviceGetCudaComputeCapability", device));
    capability = (int)number("compute_capability", index_of(device), 90);
    *major = capability / 10;
    *minor = capability % 10;
    return SUCCESS;
}
nvmlReturn_t nvmlDeviceGetMigMode(nvmlDevice_t device, unsigned int *current, unsigned int *pending)
{
    TRY(enter_gpu("nvmlDeviceGetMigMode", device));
    *current = *pending = (unsigned int)number("mig", index_of(device), 0);
    return SUCCESS;
}
nvmlReturn_t nvmlDeviceGetPciInfo_v3(nvmlDevice_t device, nvmlPciInfo_t *out)
{
    TRY(enter_gpu("nvmlDeviceGetPciInfo", device));
    memset(out, 0, sizeof *out);
    out->device = (unsigned int)index_of(device) + 6;
    snprintf(out->busId, sizeof out->busId, "00000000:00:%02x.0", out->device);
    snprintf(out->busIdLegacy, sizeof out->busIdLegacy, "0000:00:%02x.0", out->device);
    return SUCCESS;
}
nvmlReturn_t nvmlDeviceGetPciInfo(nvmlDevice_t device, nvmlPciInfo_t *out)
{
    return nvmlDeviceGetPciInfo_v3(device, out);
}
