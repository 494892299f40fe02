/* A stand-in for libnvidia-ml.so.1: answers the real pynvml from a scenario file, which a test rewrites while the
 * program runs. tests/nvml_stub/scenario.py writes it; signatures and structs are those of NVIDIA's nvml.h.
 *
 * NVML_STUB_SCENARIO  the scenario. Read again when its inode or time of change differs, so replace it, never edit it.
 * NVML_STUB_CALLS     if set: a file of "function calls" lines, kept up to date; for one process.
 *
 * One line each, "#" begins a comment line. Before the first device, for the whole system:
 *   driver TEXT           cuda NUMBER (12040 is 12.4)
 *   generation NUMBER     after a change every call fails (999) until shutdown and init: a driver reload
 *   list_at_init          GPUs are found by init only, as the real library does
 *   lock                  one call at a time, as the real library does while a GPU is wedged
 * then `gpu` begins a GPU and `mig` an instance of the GPU above it; lines about it follow:
 *   name TEXT             uuid TEXT             bus_id TEXT            lost (every call about it fails with 15)
 *   KEY NUMBER            a value in NVML's own unit, see number_keys; without a line the call is not supported
 *   process PID BYTES TYPE [SM_PERCENT]         TYPE: C, G, M (MPS client) or C+G; BYTES may be 18446744073709551615
 * and about a call, for all devices before the first one, else for one:
 *   error FUNCTION CODE   latency FUNCTION MILLISECONDS   hang FUNCTION (until the scenario no longer says so)
 *
 * Compiled with -DDRIVER_535_43 it is a driver whose process lists nvidia-ml-py cannot read.
 */
#include "scenario.h"

#define BEGIN() \
    struct device d; \
    nvmlReturn_t code = begin(__func__, device, &d); \
    if (code != SUCCESS) return code

static u64 get(const struct device *d, const char *key) { return d->numbers[number_index(key)].value; }
static int has(const struct device *d, const char *key) { return d->numbers[number_index(key)].set; }

/* ---- the system ---- */

static nvmlReturn_t initialize(const char *function) {
    nvmlReturn_t code = fate(function, NULL);
    if (code) return code;
    pthread_mutex_lock(&guard);
    if (!init_count++) {
        init_generation = now.generation;
        listed_count = 0;
        for (int i = 0; i < now.count; i++)
            if (now.devices[i].parent < 0) strcpy(listed[listed_count++].uuid, now.devices[i].uuid);
    }
    pthread_mutex_unlock(&guard);
    return SUCCESS;
}
nvmlReturn_t nvmlInitWithFlags(unsigned flags) { (void)flags; return initialize("nvmlInitWithFlags"); }
nvmlReturn_t nvmlInit_v2(void) { return initialize("nvmlInitWithFlags"); }
nvmlReturn_t nvmlInit(void) { return initialize("nvmlInitWithFlags"); }
nvmlReturn_t nvmlShutdown(void) {
    nvmlReturn_t code = fate(__func__, NULL);
    if (code) return code;
    pthread_mutex_lock(&guard);
    code = init_count ? SUCCESS : UNINITIALIZED;
    if (init_count) init_count--;
    pthread_mutex_unlock(&guard);
    return code;
}
const char *nvmlErrorString(nvmlReturn_t code) { return code == UNKNOWN ? "Unknown Error" : "stub error"; }

static nvmlReturn_t copy_text(char *to, unsigned length, const char *from) {
    if (strlen(from) + 1 > length) return INSUFFICIENT_SIZE;
    strcpy(to, from);
    return SUCCESS;
}
nvmlReturn_t nvmlSystemGetDriverVersion(char *version, unsigned length) {
    nvmlReturn_t code = begin_system(__func__);
    return code ? code : copy_text(version, length, now.driver);
}
nvmlReturn_t nvmlSystemGetNVMLVersion(char *version, unsigned length) {
    nvmlReturn_t code = begin_system(__func__);
    return code ? code : copy_text(version, length, now.driver);
}
nvmlReturn_t nvmlSystemGetCudaDriverVersion(int *version) {
    nvmlReturn_t code = begin_system(__func__);
    *version = now.cuda;
    return code;
}
nvmlReturn_t nvmlSystemGetCudaDriverVersion_v2(int *version) { return nvmlSystemGetCudaDriverVersion(version); }

/* ---- finding devices: a handle stays with its UUID ---- */

static nvmlDevice_t handle_of(const char *uuid) {                        /* with `guard` held */
    for (int i = 0; i < handle_count; i++)
        if (!strcmp(handles[i].uuid, uuid)) return &handles[i];
    if (handle_count == MAX_DEVICES) refuse(0, "too many devices over time");
    strcpy(handles[handle_count].uuid, uuid);
    return &handles[handle_count++];
}
static const char *nth_gpu(unsigned index) {                             /* with `guard` held */
    if (now.list_at_init) return index < (unsigned)listed_count ? listed[index].uuid : NULL;
    for (int i = 0; i < now.count; i++)
        if (now.devices[i].parent < 0 && !index--) return now.devices[i].uuid;
    return NULL;
}
static nvmlReturn_t give(const char *uuid, nvmlReturn_t otherwise, nvmlDevice_t *device) { /* with `guard` held */
    struct device *found = uuid ? find(uuid) : NULL;
    if (!uuid) return otherwise;
    if (!found || found->lost) return LOST;
    *device = handle_of(uuid);
    return SUCCESS;
}
nvmlReturn_t nvmlDeviceGetCount_v2(unsigned *count) {
    nvmlReturn_t code = begin_system(__func__);
    if (code) return code;
    pthread_mutex_lock(&guard);
    for (*count = 0; nth_gpu(*count); ++*count) {}
    pthread_mutex_unlock(&guard);
    return SUCCESS;
}
nvmlReturn_t nvmlDeviceGetHandleByIndex_v2(unsigned index, nvmlDevice_t *device) {
    nvmlReturn_t code = begin_system(__func__);
    if (code) return code;
    pthread_mutex_lock(&guard);
    code = give(nth_gpu(index), INVALID_ARGUMENT, device);
    pthread_mutex_unlock(&guard);
    return code;
}
nvmlReturn_t nvmlDeviceGetHandleByUUID(const char *uuid, nvmlDevice_t *device) {
    nvmlReturn_t code = begin_system(__func__);
    if (code) return code;
    pthread_mutex_lock(&guard);
    code = give(find(uuid) ? uuid : NULL, NOT_FOUND, device);
    pthread_mutex_unlock(&guard);
    return code;
}
nvmlReturn_t nvmlDeviceGetHandleByPciBusId_v2(const char *bus_id, nvmlDevice_t *device) {
    nvmlReturn_t code = begin_system(__func__);
    if (code) return code;
    const char *uuid = NULL;
    pthread_mutex_lock(&guard);
    for (int i = 0; i < now.count && !uuid; i++)
        if (now.devices[i].parent < 0 && !strcmp(now.devices[i].bus_id, bus_id)) uuid = now.devices[i].uuid;
    code = give(uuid, NOT_FOUND, device);
    pthread_mutex_unlock(&guard);
    return code;
}
nvmlReturn_t nvmlDeviceGetIndex(nvmlDevice_t device, unsigned *index) {
    BEGIN();
    pthread_mutex_lock(&guard);
    for (*index = 0; nth_gpu(*index) && strcmp(nth_gpu(*index), d.uuid); ++*index) {}
    pthread_mutex_unlock(&guard);
    return SUCCESS;
}
nvmlReturn_t nvmlDeviceGetName(nvmlDevice_t device, char *name, unsigned length) {
    BEGIN();
    return copy_text(name, length, d.name);
}
nvmlReturn_t nvmlDeviceGetUUID(nvmlDevice_t device, char *uuid, unsigned length) {
    BEGIN();
    return copy_text(uuid, length, d.uuid);
}
typedef struct {
    char busIdLegacy[16];
    unsigned domain, bus, device, pciDeviceId, pciSubSystemId;
    char busId[32];
} nvmlPciInfo_t;
nvmlReturn_t nvmlDeviceGetPciInfo_v3(nvmlDevice_t device, nvmlPciInfo_t *info) {
    BEGIN();
    memset(info, 0, sizeof *info);
    strcpy(info->busId, d.bus_id);
    snprintf(info->busIdLegacy, sizeof info->busIdLegacy, "%.15s", d.bus_id);
    sscanf(d.bus_id, "%x:%x:%x", &info->domain, &info->bus, &info->device);
    return *d.bus_id ? SUCCESS : NOT_SUPPORTED;
}

/* ---- MIG ---- */

nvmlReturn_t nvmlDeviceGetMigMode(nvmlDevice_t device, unsigned *current, unsigned *pending) {
    BEGIN();
    *current = *pending = (unsigned)get(&d, "mig_mode");
    return has(&d, "mig_mode") ? SUCCESS : NOT_SUPPORTED;
}
nvmlReturn_t nvmlDeviceGetMaxMigDeviceCount(nvmlDevice_t device, unsigned *count) {
    BEGIN();
    *count = has(&d, "mig_mode") ? 7 : 0;
    return SUCCESS;
}
nvmlReturn_t nvmlDeviceGetMigDeviceHandleByIndex(nvmlDevice_t device, unsigned index, nvmlDevice_t *instance) {
    BEGIN();
    if (!get(&d, "mig_mode")) return NOT_SUPPORTED;
    const char *uuid = NULL;
    pthread_mutex_lock(&guard);
    for (int i = 0; i < now.count && !uuid; i++) {
        struct device *candidate = &now.devices[i];
        if (candidate->parent >= 0 && !strcmp(now.devices[candidate->parent].uuid, d.uuid) && !index--)
            uuid = candidate->uuid;
    }
    code = give(uuid, NOT_FOUND, instance);
    pthread_mutex_unlock(&guard);
    return code;
}
nvmlReturn_t nvmlDeviceIsMigDeviceHandle(nvmlDevice_t device, unsigned *is_instance) {
    BEGIN();
    *is_instance = d.parent >= 0;
    return SUCCESS;
}
nvmlReturn_t nvmlDeviceGetDeviceHandleFromMigDeviceHandle(nvmlDevice_t device, nvmlDevice_t *gpu) {
    BEGIN();
    if (d.parent < 0) return INVALID_ARGUMENT;
    pthread_mutex_lock(&guard);
    *gpu = handle_of(now.devices[d.parent].uuid);
    pthread_mutex_unlock(&guard);
    return SUCCESS;
}

/* ---- memory ---- */

typedef struct { u64 total, free, used; } nvmlMemory_t;
typedef struct { unsigned version; u64 total, reserved, free, used; } nvmlMemory_v2_t;
typedef struct { u64 bar1Total, bar1Free, bar1Used; } nvmlBAR1Memory_t;

nvmlReturn_t nvmlDeviceGetMemoryInfo(nvmlDevice_t device, nvmlMemory_t *memory) {
    BEGIN();
    u64 used = get(&d, "used") + get(&d, "reserved");                    /* v1 counts the reserve as used */
    *memory = (nvmlMemory_t){get(&d, "total"), get(&d, "total") - used, used};
    return has(&d, "total") ? SUCCESS : NOT_SUPPORTED;
}
nvmlReturn_t nvmlDeviceGetMemoryInfo_v2(nvmlDevice_t device, nvmlMemory_v2_t *memory) {
    BEGIN();
    if (memory->version != (sizeof *memory | (2u << 24))) return ARGUMENT_VERSION_MISMATCH;
    u64 total = get(&d, "total"), reserved = get(&d, "reserved"), used = get(&d, "used");
    *memory = (nvmlMemory_v2_t){memory->version, total, reserved, total - reserved - used, used};
    if (total == ~0ull) memory->free = ~0ull;
    return has(&d, "total") ? SUCCESS : NOT_SUPPORTED;
}
nvmlReturn_t nvmlDeviceGetBAR1MemoryInfo(nvmlDevice_t device, nvmlBAR1Memory_t *memory) {
    BEGIN();
    u64 total = get(&d, "bar1_total"), used = get(&d, "bar1_used");
    *memory = (nvmlBAR1Memory_t){total, total - used, used};
    return has(&d, "bar1_total") ? SUCCESS : NOT_SUPPORTED;
}

/* ---- processes ---- */

typedef struct { unsigned pid; u64 usedGpuMemory; } nvmlProcessInfo_v1_t;
typedef struct { unsigned pid; u64 usedGpuMemory; unsigned gpuInstanceId, computeInstanceId; } nvmlProcessInfo_v2_t;
typedef struct {
    unsigned pid;
    u64 usedGpuMemory;
    unsigned gpuInstanceId, computeInstanceId;
    u64 usedGpuCcProtectedMemory;
} long_info;                                                             /* each of the others is a beginning of it */
typedef struct {
    unsigned pid;
    u64 timeStamp;
    unsigned smUtil, memUtil, encUtil, decUtil;
} nvmlProcessUtilizationSample_t;

static nvmlReturn_t list(const char *function, const char *type, nvmlDevice_t device, unsigned *count, char *infos,
                         size_t size) {
    struct device d;
    nvmlReturn_t code = begin(function, device, &d);
    if (code) return code;
    unsigned room = infos ? *count : 0, found = 0;
    for (int i = 0; i < d.process_count; i++) {
        struct process *p = &d.processes[i];
        if (!strstr(p->type, type) && !(*type == 'C' && *p->type == 'M')) continue;
        long_info info = {p->pid, p->bytes, ~0u, ~0u, 0};
        if (d.parent >= 0) {
            info.gpuInstanceId = (unsigned)get(&d, "gi");
            info.computeInstanceId = (unsigned)get(&d, "ci");
        }
        if (found < room) memcpy(infos + found * size, &info, size);
        found++;
    }
    *count = found;
    return found > room ? INSUFFICIENT_SIZE : SUCCESS;
}
#ifdef DRIVER_535_43
#define V3_SIZE sizeof(long_info)
#else
#define V3_SIZE sizeof(nvmlProcessInfo_v2_t)
#endif
#define PROCESS_LISTS(NAME, TYPE) \
    nvmlReturn_t NAME(nvmlDevice_t device, unsigned *count, void *infos) { \
        return list(#NAME, TYPE, device, count, infos, sizeof(nvmlProcessInfo_v1_t)); \
    } \
    nvmlReturn_t NAME##_v2(nvmlDevice_t device, unsigned *count, void *infos) { \
        return list(#NAME "_v2", TYPE, device, count, infos, sizeof(nvmlProcessInfo_v2_t)); \
    } \
    nvmlReturn_t NAME##_v3(nvmlDevice_t device, unsigned *count, void *infos) { \
        return list(#NAME "_v3", TYPE, device, count, infos, V3_SIZE); \
    }
PROCESS_LISTS(nvmlDeviceGetComputeRunningProcesses, "C")
PROCESS_LISTS(nvmlDeviceGetGraphicsRunningProcesses, "G")
PROCESS_LISTS(nvmlDeviceGetMPSComputeRunningProcesses, "M")

nvmlReturn_t nvmlDeviceGetProcessUtilization(nvmlDevice_t device, nvmlProcessUtilizationSample_t *samples,
                                             unsigned *count, u64 last_seen) {
    BEGIN();
    unsigned room = samples ? *count : 0, found = 0;
    struct timespec time;
    clock_gettime(CLOCK_REALTIME, &time);
    u64 stamp = (u64)time.tv_sec * 1000000 + (u64)time.tv_nsec / 1000;
    for (int i = 0; i < d.process_count && stamp > last_seen; i++) {
        struct process *p = &d.processes[i];
        if (!p->has_sm) continue;
        if (found < room) samples[found] = (nvmlProcessUtilizationSample_t){p->pid, stamp, p->sm, 0, 0, 0};
        found++;
    }
    *count = found;
    return !found ? NOT_FOUND : found > room ? INSUFFICIENT_SIZE : SUCCESS;
}
/* Drivers 535.43 to 535.86 have the first of these and not the second, and longer structs in the third lists. */
nvmlReturn_t nvmlDeviceGetConfComputeMemSizeInfo(nvmlDevice_t device, void *sizes) {
    (void)sizes;
    BEGIN();
    return NOT_SUPPORTED;
}
#ifndef DRIVER_535_43
nvmlReturn_t nvmlDeviceGetRunningProcessDetailList(nvmlDevice_t device, void *details) {
    (void)details;
    BEGIN();
    return NOT_SUPPORTED;
}
#endif

/* ---- single numbers ---- */

#define NUMBER(NAME, TYPE, KEY) \
    nvmlReturn_t NAME(nvmlDevice_t device, TYPE *value) { \
        BEGIN(); \
        if (!has(&d, KEY)) return NOT_SUPPORTED; \
        *value = (TYPE)get(&d, KEY); \
        return SUCCESS; \
    }
NUMBER(nvmlDeviceGetPowerUsage, unsigned, "power_mw")
NUMBER(nvmlDeviceGetEnforcedPowerLimit, unsigned, "power_limit_mw")
NUMBER(nvmlDeviceGetPowerManagementLimit, unsigned, "power_limit_mw")
NUMBER(nvmlDeviceGetTotalEnergyConsumption, u64, "energy_mj")
NUMBER(nvmlDeviceGetFanSpeed, unsigned, "fan")
NUMBER(nvmlDeviceGetPerformanceState, unsigned, "performance_state")
NUMBER(nvmlDeviceGetCurrPcieLinkGeneration, unsigned, "pcie_generation")
NUMBER(nvmlDeviceGetCurrPcieLinkWidth, unsigned, "pcie_width")
NUMBER(nvmlDeviceGetMaxPcieLinkGeneration, unsigned, "max_pcie_generation")
NUMBER(nvmlDeviceGetMaxPcieLinkWidth, unsigned, "max_pcie_width")
NUMBER(nvmlDeviceGetCurrentClocksThrottleReasons, u64, "throttle")
NUMBER(nvmlDeviceGetCurrentClocksEventReasons, u64, "throttle")
NUMBER(nvmlDeviceGetVirtualizationMode, unsigned, "virtualization")
NUMBER(nvmlDeviceGetArchitecture, unsigned, "architecture")
NUMBER(nvmlDeviceGetBusType, unsigned, "bus_type")
NUMBER(nvmlDeviceGetPersistenceMode, unsigned, "persistence")
NUMBER(nvmlDeviceGetComputeMode, unsigned, "compute_mode")
NUMBER(nvmlDeviceGetDisplayActive, unsigned, "display_active")
NUMBER(nvmlDeviceGetDisplayMode, unsigned, "display_active")
NUMBER(nvmlDeviceGetGpuInstanceId, unsigned, "gi")
NUMBER(nvmlDeviceGetComputeInstanceId, unsigned, "ci")

typedef struct { unsigned gpu, memory; } nvmlUtilization_t;
nvmlReturn_t nvmlDeviceGetUtilizationRates(nvmlDevice_t device, nvmlUtilization_t *rates) {
    BEGIN();
    *rates = (nvmlUtilization_t){(unsigned)get(&d, "utilization"), (unsigned)get(&d, "memory_utilization")};
    return has(&d, "utilization") && !get(&d, "mig_mode") ? SUCCESS : NOT_SUPPORTED;
}
static nvmlReturn_t with_period(const struct device *d, const char *key, unsigned *value, unsigned *period_us) {
    *value = (unsigned)get(d, key);
    *period_us = 167000;
    return has(d, key) ? SUCCESS : NOT_SUPPORTED;
}
nvmlReturn_t nvmlDeviceGetEncoderUtilization(nvmlDevice_t device, unsigned *value, unsigned *period_us) {
    BEGIN();
    return with_period(&d, "encoder", value, period_us);
}
nvmlReturn_t nvmlDeviceGetDecoderUtilization(nvmlDevice_t device, unsigned *value, unsigned *period_us) {
    BEGIN();
    return with_period(&d, "decoder", value, period_us);
}
nvmlReturn_t nvmlDeviceGetCudaComputeCapability(nvmlDevice_t device, int *major, int *minor) {
    BEGIN();
    *major = (int)get(&d, "major");
    *minor = (int)get(&d, "minor");
    return has(&d, "major") ? SUCCESS : NOT_SUPPORTED;
}

/* one of several numbers, by an index */
static nvmlReturn_t choose(const char *function, nvmlDevice_t device, const char *const *keys, unsigned length,
                           unsigned index, u64 *value) {
    struct device d;
    nvmlReturn_t code = begin(function, device, &d);
    if (code) return code;
    if (index >= length || !keys[index] || !has(&d, keys[index])) return NOT_SUPPORTED;
    *value = get(&d, keys[index]);
    return SUCCESS;
}
#define CHOOSE(INDEX, ...) \
    static const char *const keys[] = {__VA_ARGS__}; \
    u64 number = 0; \
    nvmlReturn_t code = choose(__func__, device, keys, sizeof keys / sizeof *keys, INDEX, &number); \
    if (code == SUCCESS) *value = number; \
    return code
nvmlReturn_t nvmlDeviceGetTemperature(nvmlDevice_t device, unsigned sensor, unsigned *value) {
    CHOOSE(sensor, "temperature");
}
nvmlReturn_t nvmlDeviceGetTemperatureThreshold(nvmlDevice_t device, unsigned threshold, unsigned *value) {
    CHOOSE(threshold, "shutdown_temperature", "slowdown_temperature");
}
nvmlReturn_t nvmlDeviceGetClockInfo(nvmlDevice_t device, unsigned clock, unsigned *value) {
    CHOOSE(clock, "graphics_clock", "sm_clock", "memory_clock", "video_clock");
}
nvmlReturn_t nvmlDeviceGetMaxClockInfo(nvmlDevice_t device, unsigned clock, unsigned *value) {
    CHOOSE(clock, "max_graphics_clock", "max_sm_clock", "max_memory_clock", "max_video_clock");
}
nvmlReturn_t nvmlDeviceGetPcieThroughput(nvmlDevice_t device, unsigned counter, unsigned *value) {
    CHOOSE(counter, "pcie_tx_kib_per_s", "pcie_rx_kib_per_s");
}
nvmlReturn_t nvmlDeviceGetTotalEccErrors(nvmlDevice_t device, unsigned error, unsigned counter, u64 *value) {
    (void)counter;
    CHOOSE(error, "ecc_corrected", "ecc_uncorrected");
}
typedef struct { unsigned version, sensorType; int temperature; } nvmlTemperature_v1_t;
nvmlReturn_t nvmlDeviceGetTemperatureV(nvmlDevice_t device, nvmlTemperature_v1_t *temperature) {
    BEGIN();
    temperature->temperature = (int)get(&d, "temperature");
    return has(&d, "temperature") ? SUCCESS : NOT_SUPPORTED;
}

typedef struct {
    unsigned fieldId, scopeId;
    long long timestamp, latencyUsec;
    unsigned valueType;
    nvmlReturn_t nvmlReturn;
    u64 value;
} nvmlFieldValue_t;
nvmlReturn_t nvmlDeviceGetFieldValues(nvmlDevice_t device, int count, nvmlFieldValue_t *values) {
    BEGIN();
    struct timespec time;
    clock_gettime(CLOCK_REALTIME, &time);
    u64 links = has(&d, "nvlinks") ? get(&d, "nvlinks") : 0;
    for (int i = 0; i < count; i++) {
        nvmlFieldValue_t *field = &values[i];
        int sent = field->fieldId == 138, received = field->fieldId == 139;
        const char *key = sent ? "nvlink_tx_kib" : received ? "nvlink_rx_kib" : "nvlinks";
        field->valueType = 3;                                            /* unsigned long long */
        field->timestamp = has(&d, "nvlink_time_us") ? (long long)get(&d, "nvlink_time_us")
                                                     : time.tv_sec * 1000000ll + time.tv_nsec / 1000;
        field->nvmlReturn = NOT_SUPPORTED;
        if (!links || !has(&d, key) || !(sent || received || field->fieldId == 91)) continue;
        if ((sent || received) && field->scopeId != ~0u && field->scopeId >= links) continue;
        int one = (sent || received) && field->scopeId != ~0u;           /* ~0: the sum over all links */
        field->value = one ? get(&d, key) / links : get(&d, key);
        field->nvmlReturn = SUCCESS;
    }
    return SUCCESS;
}
/* Windows only; without the symbols nvitop complains. */
nvmlReturn_t nvmlDeviceGetDriverModel(nvmlDevice_t device, unsigned *current, unsigned *pending) {
    (void)current, (void)pending;
    BEGIN();
    return NOT_SUPPORTED;
}
nvmlReturn_t nvmlDeviceGetDriverModel_v2(nvmlDevice_t device, unsigned *current, unsigned *pending) {
    return nvmlDeviceGetDriverModel(device, current, pending);
}

/* ---- for the test that compares sizes with nvidia-ml-py's declarations ---- */

unsigned long stub_size(const char *type) {
#define SIZE(TYPE) if (!strcmp(type, #TYPE)) return sizeof(TYPE)
    SIZE(nvmlMemory_t);
    SIZE(nvmlMemory_v2_t);
    SIZE(nvmlBAR1Memory_t);
    SIZE(nvmlPciInfo_t);
    SIZE(nvmlProcessInfo_v2_t);
    SIZE(nvmlProcessUtilizationSample_t);
    SIZE(nvmlUtilization_t);
    SIZE(nvmlTemperature_v1_t);
    SIZE(nvmlFieldValue_t);
    return 0;
}
