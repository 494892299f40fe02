/* A stand-in for libamd_smi.so: answers the real amdsmi binding from a scenario file, which a test rewrites while the
 * program runs. tests/amdsmi_stub/machine.py writes it; signatures and structs are those of amdsmi.h of ROCm 7.0, which
 * tests/monitor/test_amd_stub.py holds to the installed binding's.
 *
 * AMDSMI_STUB_SCENARIO and AMDSMI_STUB_CALLS are files as of the stand-in for NVML, whose scenario.h reads the same
 * lines; `lost` fails every call about a GPU with 42, as the library has it for EIO. All other functions of the library
 * are there and not supported: others.h has them, made from the names that the binding asks for when it is imported.
 */
#define STUB "AMDSMI"
#define STUB_CODES SUCCESS = 0, INVALID_ARGUMENT = 1, NOT_SUPPORTED = 2, OUT_OF_RESOURCES = 15, NOT_FOUND = 31, \
    UNINITIALIZED = 32, LOST = 42, UNKNOWN = -1
#include "../nvml_stub/scenario.h"

typedef nvmlDevice_t amdsmi_processor_handle;
typedef unsigned u32;

#define BEGIN() \
    struct device d; \
    int code = begin(__func__, device, &d); \
    if (code != SUCCESS) return code

static u64 get(const struct device *d, const char *key) { return d->numbers[number_index(key)].value; }
static int has(const struct device *d, const char *key) { return d->numbers[number_index(key)].set; }
static u32 or_none(const struct device *d, const char *key) { return has(d, key) ? (u32)get(d, key) : ~0u; }

/* ---- the system: a processor is found by init only, one to a socket, and its handle dies with shut_down ---- */

int amdsmi_init(u64 flags) {
    (void)flags;
    int code = fate(__func__, NULL);
    if (code) return code;
    pthread_mutex_lock(&guard);
    if (!init_count) {
        init_count = 1;
        init_generation = now.generation;
        listed_count = 0;
        for (int i = 0; i < now.count; i++) strcpy(listed[listed_count++].uuid, now.devices[i].uuid);
    }
    pthread_mutex_unlock(&guard);
    return SUCCESS;
}
int amdsmi_shut_down(void) {
    int code = fate(__func__, NULL);
    if (code) return code;
    pthread_mutex_lock(&guard);
    init_count = 0;                                                      /* the library does not count its starts */
    pthread_mutex_unlock(&guard);
    return SUCCESS;
}
typedef struct { u32 major, minor, release; const char *build; } amdsmi_version_t;
int amdsmi_get_lib_version(amdsmi_version_t *version) {
    *version = (amdsmi_version_t){26, 0, 2, "26.0.2+stub"};
    return fate(__func__, NULL);
}
void amdsmi_free_name_value_pairs(void *pairs) { (void)pairs; }

int amdsmi_get_socket_handles(u32 *count, void **sockets) {
    int code = begin_system(__func__);
    if (code) return code;
    pthread_mutex_lock(&guard);
    if (sockets)
        for (u32 i = 0; i < *count && i < (u32)listed_count; i++) sockets[i] = &listed[i];
    *count = (u32)listed_count;
    pthread_mutex_unlock(&guard);
    return SUCCESS;
}
int amdsmi_get_processor_handles(void *socket, u32 *count, amdsmi_processor_handle *processors) {
    int code = begin_system(__func__);
    if (code) return code;
    if (processors && *count) *processors = socket;
    *count = 1;
    return SUCCESS;
}

/* ---- what names a GPU ---- */

int amdsmi_get_gpu_device_uuid(amdsmi_processor_handle device, u32 *length, char *uuid) {
    BEGIN();
    snprintf(uuid, *length, "%.*s", (int)strcspn(d.uuid, "/"), d.uuid);  /* partitions of a GPU have the same */
    return SUCCESS;
}
typedef union {
    struct { u64 function : 3, device : 5, bus : 8, domain : 48; } part;
    u64 whole;
} amdsmi_bdf_t;
int amdsmi_get_gpu_device_bdf(amdsmi_processor_handle device, amdsmi_bdf_t *bdf) {
    BEGIN();
    unsigned domain = 0, bus = 0, slot = 0, function = 0;
    sscanf(d.bus_id, "%x:%x:%x.%x", &domain, &bus, &slot, &function);
    bdf->whole = 0;
    bdf->part.domain = domain, bdf->part.bus = bus & 255u, bdf->part.device = slot & 31u;
    bdf->part.function = function & 7u;
    return SUCCESS;
}
typedef struct {
    char market_name[256];
    u32 vendor_id;
    char vendor_name[256];
    u32 subvendor_id;
    u64 device_id;
    u32 rev_id;
    char asic_serial[256];
    u32 oam_id, num_of_compute_units;
    u64 target_graphics_version;
    u32 subsystem_id, reserved[21];
} amdsmi_asic_info_t;
int amdsmi_get_gpu_asic_info(amdsmi_processor_handle device, amdsmi_asic_info_t *info) {
    BEGIN();
    memset(info, 0, sizeof *info);
    strcpy(info->market_name, d.name);
    strcpy(info->vendor_name, "Advanced Micro Devices Inc. [AMD/ATI]");
    strcpy(info->asic_serial, "0123456789ABCDEF");
    info->vendor_id = 0x1002;
    info->num_of_compute_units = or_none(&d, "compute_units");
    info->target_graphics_version = get(&d, "gfx");
    return SUCCESS;
}
typedef struct { u32 drm_render, drm_card, hsa_id, hip_id; char hip_uuid[256]; } amdsmi_enumeration_info_t;
int amdsmi_get_gpu_enumeration_info(amdsmi_processor_handle device, amdsmi_enumeration_info_t *info) {
    BEGIN();
    memset(info, 0, sizeof *info);
    info->drm_render = 128, info->hip_id = or_none(&d, "runtime_index");
    snprintf(info->hip_uuid, sizeof info->hip_uuid, "GPU-%.16s", d.uuid);
    return has(&d, "runtime_index") ? SUCCESS : NOT_SUPPORTED;
}
typedef struct { u64 kfd_id; u32 node_id, current_partition_id, reserved[12]; } amdsmi_kfd_info_t;
int amdsmi_get_gpu_kfd_info(amdsmi_processor_handle device, amdsmi_kfd_info_t *info) {
    BEGIN();
    memset(info, 0, sizeof *info);
    info->kfd_id = 1000, info->node_id = (u32)get(&d, "node"), info->current_partition_id = (u32)get(&d, "partition");
    return SUCCESS;
}
typedef struct { char driver_version[256], driver_date[256], driver_name[256]; } amdsmi_driver_info_t;
int amdsmi_get_gpu_driver_info(amdsmi_processor_handle device, amdsmi_driver_info_t *info) {
    BEGIN();
    memset(info, 0, sizeof *info);
    strcpy(info->driver_version, now.driver);
    strcpy(info->driver_name, "amdgpu");
    return SUCCESS;
}
int amdsmi_get_gpu_virtualization_mode(amdsmi_processor_handle device, u32 *mode) {
    BEGIN();
    *mode = (u32)get(&d, "virtualization");
    return has(&d, "virtualization") ? SUCCESS : NOT_SUPPORTED;
}
static int copy_partition(char *to, u32 length, const char *from) {
    snprintf(to, length, "%s", from);
    return *from ? SUCCESS : NOT_SUPPORTED;
}
int amdsmi_get_gpu_compute_partition(amdsmi_processor_handle device, char *partition, u32 length) {
    BEGIN();
    return copy_partition(partition, length, d.compute_partition);
}
int amdsmi_get_gpu_memory_partition(amdsmi_processor_handle device, char *partition, u32 length) {
    BEGIN();
    return copy_partition(partition, length, d.memory_partition);
}

/* ---- memory and processes ---- */

int amdsmi_get_gpu_memory_total(amdsmi_processor_handle device, u32 kind, u64 *total) {
    BEGIN();
    *total = get(&d, "total");
    return has(&d, "total") && !kind ? SUCCESS : NOT_SUPPORTED;
}
int amdsmi_get_gpu_memory_usage(amdsmi_processor_handle device, u32 kind, u64 *used) {
    BEGIN();
    *used = get(&d, "used");
    return has(&d, "used") && !kind ? SUCCESS : NOT_SUPPORTED;
}
typedef struct {
    char name[256];
    u32 pid;
    u64 mem;
    struct { u64 gfx, enc; u32 reserved[12]; } engine_usage;
    struct { u64 gtt_mem, cpu_mem, vram_mem; u32 reserved[10]; } memory_usage;
    char container_name[256];
    u32 cu_occupancy, reserved[11];
} amdsmi_proc_info_t;
int amdsmi_get_gpu_process_list(amdsmi_processor_handle device, u32 *count, amdsmi_proc_info_t *list) {
    BEGIN();
    u32 room = *count;
    for (u32 i = 0; i < room && i < (u32)d.process_count; i++) {
        struct process *p = &d.processes[i];
        memset(&list[i], 0, sizeof list[i]);
        snprintf(list[i].name, sizeof list[i].name, "pyth\xf6n");         /* a name may be any bytes */
        list[i].pid = p->pid, list[i].cu_occupancy = p->has_sm ? p->sm : ~0u;
        list[i].mem = list[i].memory_usage.vram_mem = p->bytes;
        list[i].memory_usage.gtt_mem = 7 << 20;
    }
    *count = (u32)d.process_count;
    return room && room < *count ? OUT_OF_RESOURCES : SUCCESS;
}

/* ---- what it does ---- */

typedef struct { u32 gfx_activity, umc_activity, mm_activity, reserved[13]; } amdsmi_engine_usage_t;
int amdsmi_get_gpu_activity(amdsmi_processor_handle device, amdsmi_engine_usage_t *usage) {
    BEGIN();
    memset(usage, 0, sizeof *usage);
    usage->gfx_activity = has(&d, "utilization") ? (u32)get(&d, "utilization") : 0xFFFF;
    usage->umc_activity = has(&d, "memory_utilization") ? (u32)get(&d, "memory_utilization") : 0xFFFF;
    usage->mm_activity = 0xFFFF;
    return SUCCESS;
}
typedef struct {
    u64 socket_power;
    u32 current_socket_power, average_socket_power;
    u64 gfx_voltage, soc_voltage, mem_voltage;
    u32 power_limit;
    u64 reserved[18];
} amdsmi_power_info_t;
int amdsmi_get_power_info(amdsmi_processor_handle device, amdsmi_power_info_t *info) {
    BEGIN();
    memset(info, 0, sizeof *info);
    u32 watts = (u32)(get(&d, "power_mw") / 1000);
    info->socket_power = has(&d, "power_mw") ? watts : 0xFFFF;
    info->current_socket_power = has(&d, "power_mw") ? watts : 0xFFFF, info->average_socket_power = 0xFFFF;
    return SUCCESS;
}
typedef struct {
    u64 power_cap, default_power_cap, dpm_cap, min_power_cap, max_power_cap, reserved[3];
} amdsmi_power_cap_info_t;
int amdsmi_get_power_cap_info(amdsmi_processor_handle device, u32 sensor, amdsmi_power_cap_info_t *info) {
    BEGIN();
    memset(info, 0, sizeof *info);
    info->power_cap = 1000 * get(&d, "power_limit_mw");
    return has(&d, "power_limit_mw") && !sensor ? SUCCESS : NOT_SUPPORTED;
}
int amdsmi_get_temp_metric(amdsmi_processor_handle device, u32 sensor, u32 metric, long long *degrees) {
    BEGIN();
    const char *key = metric == 0 ? "temperature" : "slowdown_temperature";
    *degrees = (long long)get(&d, key);
    return has(&d, key) && sensor == 1 && (metric == 0 || metric == 5) ? SUCCESS : NOT_SUPPORTED;
}
int amdsmi_get_gpu_fan_speed(amdsmi_processor_handle device, u32 sensor, long long *speed) {
    BEGIN();
    *speed = (long long)get(&d, "fan") * 255 / 100;
    return has(&d, "fan") && !sensor ? SUCCESS : NOT_SUPPORTED;
}
typedef struct {
    u32 clk, min_clk, max_clk;
    unsigned char clk_locked, clk_deep_sleep;
    u32 reserved[4];
} amdsmi_clk_info_t;
int amdsmi_get_clock_info(amdsmi_processor_handle device, u32 kind, amdsmi_clk_info_t *info) {
    BEGIN();
    const char *key = kind == 0 ? "graphics_clock" : "memory_clock";
    memset(info, 0, sizeof *info);
    info->clk = or_none(&d, key);
    return kind == 0 || kind == 4 ? SUCCESS : NOT_SUPPORTED;
}
typedef struct {
    struct {
        unsigned short max_pcie_width;
        u32 max_pcie_speed, pcie_interface_version, slot_type, max_pcie_interface_version;
        u64 reserved[9];
    } pcie_static;
    struct {
        unsigned short pcie_width;
        u32 pcie_speed, pcie_bandwidth;
        u64 counts[5];
        u32 other_end;
        u64 reserved[12];
    } pcie_metric;
    u64 reserved[32];
} amdsmi_pcie_info_t;
int amdsmi_get_pcie_info(amdsmi_processor_handle device, amdsmi_pcie_info_t *info) {
    static const u32 speeds[] = {0, 2500, 5000, 8000, 16000, 32000, 64000};
    BEGIN();
    memset(info, 0, sizeof *info);
    u64 generation = get(&d, "pcie_generation");
    info->pcie_metric.pcie_width = has(&d, "pcie_width") ? (unsigned short)get(&d, "pcie_width") : 0xFFFF;
    info->pcie_metric.pcie_speed = generation && generation < 7 ? speeds[generation] : ~0u;
    return SUCCESS;
}
typedef struct { u64 correctable_count, uncorrectable_count, deferred_count, reserved[5]; } amdsmi_error_count_t;
int amdsmi_get_gpu_total_ecc_count(amdsmi_processor_handle device, amdsmi_error_count_t *count) {
    BEGIN();
    *count = (amdsmi_error_count_t){get(&d, "ecc_corrected"), get(&d, "ecc_uncorrected"), 0, {0}};
    return has(&d, "ecc_corrected") ? SUCCESS : NOT_SUPPORTED;
}
typedef struct {
    u64 reference_timestamp, violation_timestamp, accumulated[7], percent[6];
    unsigned char prochot, power, socket, regulator, memory, below_limit;
    u64 accumulated_parts[4][8][8], percent_parts[4][8][8];
    unsigned char active_parts[4][8][8];
    u64 reserved[3][8][8];
} amdsmi_violation_status_t;
int amdsmi_get_violation_status(amdsmi_processor_handle device, amdsmi_violation_status_t *status) {
    BEGIN();
    memset(status, 0, sizeof *status);
    u64 bits = get(&d, "throttle");
    status->power = bits & 1, status->socket = bits >> 1 & 1, status->regulator = bits >> 2 & 1;
    status->memory = bits >> 3 & 1, status->prochot = bits >> 4 & 1;
    return has(&d, "throttle") ? SUCCESS : NOT_SUPPORTED;
}

/* ---- for tests of the stand-in itself ---- */

unsigned long stub_size(const char *type) {
#define SIZE(TYPE) if (!strcmp(type, #TYPE)) return sizeof(TYPE)
    SIZE(amdsmi_asic_info_t);
    SIZE(amdsmi_bdf_t);
    SIZE(amdsmi_clk_info_t);
    SIZE(amdsmi_driver_info_t);
    SIZE(amdsmi_engine_usage_t);
    SIZE(amdsmi_enumeration_info_t);
    SIZE(amdsmi_error_count_t);
    SIZE(amdsmi_kfd_info_t);
    SIZE(amdsmi_pcie_info_t);
    SIZE(amdsmi_power_cap_info_t);
    SIZE(amdsmi_power_info_t);
    SIZE(amdsmi_proc_info_t);
    SIZE(amdsmi_version_t);
    SIZE(amdsmi_violation_status_t);
    return 0;
}

#define OTHER(NAME) int NAME(void) { return NOT_SUPPORTED; }
#include "others.h"
