/* A stand-in for libnvidia-ml.so.1: answers the real pynvml from a scenario file that a test writes.
 *
 * NVML_STUB_SCENARIO names the file. One line each:
 *   init CODE                                    what nvmlInit returns (an nvmlReturn_t)
 *   gpu NAME|UUID|TOTAL|RESERVED|USED|MAJOR|MINOR|PID,PID,...     bytes; the pids may be empty
 * Signatures and structs are those of NVIDIA's nvml.h.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef int nvmlReturn_t;
typedef struct gpu *nvmlDevice_t;
enum { SUCCESS = 0, UNINITIALIZED = 1, INVALID_ARGUMENT = 2, INSUFFICIENT_SIZE = 7, MAX_GPUS = 16, MAX_PIDS = 64 };

struct gpu {
    char name[96], uuid[96];
    unsigned long long total, reserved, used;
    int major, minor;
    unsigned int pid_count, pids[MAX_PIDS];
};

typedef struct { unsigned int version; unsigned long long total, reserved, free, used; } nvmlMemory_v2_t;
typedef struct {
    unsigned int pid;
    unsigned long long usedGpuMemory;
    unsigned int gpuInstanceId, computeInstanceId;
} nvmlProcessInfo_v2_t;

static struct gpu gpus[MAX_GPUS];
static unsigned int gpu_count;
static int init_code, initialized;

static void read_gpu(char *line) {
    struct gpu *g = &gpus[gpu_count++];
    char pids[1024] = "";
    memset(g, 0, sizeof *g);
    sscanf(line, "%95[^|]|%95[^|]|%llu|%llu|%llu|%d|%d|%1023[^\n]", g->name, g->uuid, &g->total, &g->reserved,
           &g->used, &g->major, &g->minor, pids);
    for (char *pid = strtok(pids, ","); pid && g->pid_count < MAX_PIDS; pid = strtok(NULL, ","))
        g->pids[g->pid_count++] = (unsigned int)strtoul(pid, NULL, 10);
}

static void read_scenario(void) {
    const char *path = getenv("NVML_STUB_SCENARIO");
    FILE *file = path ? fopen(path, "r") : NULL;
    char line[2048];
    gpu_count = 0;
    init_code = SUCCESS;
    if (!file) return;
    while (fgets(line, sizeof line, file)) {
        if (!strncmp(line, "init ", 5)) init_code = atoi(line + 5);
        if (!strncmp(line, "gpu ", 4) && gpu_count < MAX_GPUS) read_gpu(line + 4);
    }
    fclose(file);
}

nvmlReturn_t nvmlInitWithFlags(unsigned int flags) {
    (void)flags;
    read_scenario();
    initialized = init_code == SUCCESS;
    return init_code;
}
nvmlReturn_t nvmlInit_v2(void) { return nvmlInitWithFlags(0); }
nvmlReturn_t nvmlShutdown(void) { initialized = 0; return SUCCESS; }
const char *nvmlErrorString(nvmlReturn_t code) { return code == 999 ? "Unknown Error" : "stub error"; }

nvmlReturn_t nvmlDeviceGetCount_v2(unsigned int *count) {
    if (!initialized) return UNINITIALIZED;
    *count = gpu_count;
    return SUCCESS;
}
nvmlReturn_t nvmlDeviceGetHandleByIndex_v2(unsigned int index, nvmlDevice_t *device) {
    if (index >= gpu_count) return INVALID_ARGUMENT;
    *device = &gpus[index];
    return SUCCESS;
}
static nvmlReturn_t copy(char *to, unsigned int length, const char *from) {
    if (strlen(from) + 1 > length) return INSUFFICIENT_SIZE;
    strcpy(to, from);
    return SUCCESS;
}
nvmlReturn_t nvmlDeviceGetName(nvmlDevice_t g, char *name, unsigned int length) { return copy(name, length, g->name); }
nvmlReturn_t nvmlDeviceGetUUID(nvmlDevice_t g, char *uuid, unsigned int length) { return copy(uuid, length, g->uuid); }
nvmlReturn_t nvmlDeviceGetMemoryInfo_v2(nvmlDevice_t g, nvmlMemory_v2_t *memory) {
    if (memory->version != (sizeof *memory | (2u << 24))) return INVALID_ARGUMENT;
    memory->total = g->total;
    memory->reserved = g->reserved;
    memory->used = g->used;
    memory->free = g->total - g->reserved - g->used;
    return SUCCESS;
}
nvmlReturn_t nvmlDeviceGetCudaComputeCapability(nvmlDevice_t g, int *major, int *minor) {
    *major = g->major;
    *minor = g->minor;
    return SUCCESS;
}
nvmlReturn_t nvmlDeviceGetComputeRunningProcesses_v3(nvmlDevice_t g, unsigned int *count, nvmlProcessInfo_v2_t *infos) {
    unsigned int room = *count;
    *count = g->pid_count;
    if (room < g->pid_count) return INSUFFICIENT_SIZE;
    for (unsigned int i = 0; i < g->pid_count; i++)
        infos[i] = (nvmlProcessInfo_v2_t){g->pids[i], g->used / g->pid_count, 0xffffffff, 0xffffffff};
    return SUCCESS;
}
