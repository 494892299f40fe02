/* What a stand-in knows and how each call begins: the scenario, the count of calls, waiting and failing as told.
 * STUB is how its environment variables begin and what it calls itself; STUB_CODES are its library's codes of errors. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

typedef int nvmlReturn_t;
typedef struct handle { char uuid[96]; } *nvmlDevice_t;
typedef unsigned long long u64;
#ifndef STUB
#define STUB "NVML"
#define STUB_CODES SUCCESS = 0, UNINITIALIZED = 1, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6, \
    INSUFFICIENT_SIZE = 7, LOST = 15, ARGUMENT_VERSION_MISMATCH = 25, UNKNOWN = 999
#endif
enum { STUB_CODES };
enum { MAX_DEVICES = 160, MAX_PROCESSES = 64, MAX_RULES = 64, MAX_FUNCTIONS = 128, CALL_LINE = 64 };

static const char *number_keys[] = {
    "total", "reserved", "used", "bar1_total", "bar1_used", "major", "minor", "architecture", "bus_type",
    "virtualization", "utilization", "memory_utilization", "encoder", "decoder", "power_mw", "power_limit_mw",
    "temperature", "shutdown_temperature", "slowdown_temperature", "fan", "graphics_clock", "sm_clock",
    "memory_clock", "video_clock", "max_graphics_clock", "max_sm_clock", "max_memory_clock", "max_video_clock",
    "pcie_generation", "pcie_width", "max_pcie_generation", "max_pcie_width", "pcie_tx_kib_per_s",
    "pcie_rx_kib_per_s", "ecc_corrected", "ecc_uncorrected", "performance_state", "throttle", "mig_mode",
    "persistence", "compute_mode", "display_active", "gi", "ci", "compute_units", "gfx", "partition", "runtime_index",
    "node", "energy_mj", "nvlinks", "nvlink_rx_kib", "nvlink_tx_kib", "nvlink_time_us"};
enum { NUMBERS = sizeof number_keys / sizeof *number_keys };
typedef struct { u64 value; int set; } number;

struct process { unsigned pid, sm; u64 bytes; char type[8]; int has_sm; };
struct rule { char function[64]; int code, hang; double latency_ms; };
struct rules { struct rule rule[MAX_RULES]; int count; };
struct device {
    char name[96], uuid[96], bus_id[32], compute_partition[16], memory_partition[16];
    int lost, parent, process_count;                                     /* parent: -1 for a GPU */
    number numbers[NUMBERS];
    struct process processes[MAX_PROCESSES];
    struct rules rules;
};
struct scenario {
    char driver[80];
    int cuda, list_at_init, lock, count;
    u64 generation;
    struct rules rules;
    struct device devices[MAX_DEVICES];
};

static pthread_mutex_t guard = PTHREAD_MUTEX_INITIALIZER, one_call = PTHREAD_MUTEX_INITIALIZER;
static struct scenario now, next;
static struct stat last_read;
static struct handle handles[MAX_DEVICES], listed[MAX_DEVICES];
static int handle_count, listed_count, init_count;
static u64 init_generation;

/* ---- the scenario file ---- */

static void refuse(int line, const char *text) {
    fprintf(stderr, STUB " stub: scenario line %d: %s\n", line, text);
    _exit(70);
}
static int number_index(const char *key) {
    for (int i = 0; i < NUMBERS; i++)
        if (!strcmp(number_keys[i], key)) return i;
    return -1;
}
static struct rule *rule_for(struct rules *rules, const char *function, int line) {
    for (int i = 0; i < rules->count; i++)
        if (!strcmp(rules->rule[i].function, function)) return &rules->rule[i];
    if (rules->count == MAX_RULES) refuse(line, "too many rules");
    struct rule *rule = &rules->rule[rules->count++];
    memset(rule, 0, sizeof *rule);
    snprintf(rule->function, sizeof rule->function, "%s", function);
    return rule;
}
static int read_rule(struct rules *rules, const char *key, const char *rest, int line) {
    char function[64] = "";
    double value = 0;
    if (strcmp(key, "error") && strcmp(key, "latency") && strcmp(key, "hang")) return 0;
    if (sscanf(rest, "%63s %lf", function, &value) < (strcmp(key, "hang") ? 2 : 1)) refuse(line, rest);
    struct rule *rule = rule_for(rules, function, line);
    if (*key == 'e') rule->code = (int)value;
    if (*key == 'l') rule->latency_ms = value;
    if (*key == 'h') rule->hang = 1;
    return 1;
}
static void read_system_line(struct scenario *s, const char *key, const char *rest, int line) {
    if (!strcmp(key, "driver")) snprintf(s->driver, sizeof s->driver, "%s", rest);
    else if (!strcmp(key, "cuda")) s->cuda = atoi(rest);
    else if (!strcmp(key, "generation")) s->generation = strtoull(rest, NULL, 10);
    else if (!strcmp(key, "list_at_init")) s->list_at_init = 1;
    else if (!strcmp(key, "lock")) s->lock = 1;
    else if (!read_rule(&s->rules, key, rest, line)) refuse(line, key);
}
static void read_device_line(struct device *d, const char *key, const char *rest, int line) {
    int index = number_index(key);
    if (index >= 0) d->numbers[index] = (number){strtoull(rest, NULL, 10), 1};
    else if (!strcmp(key, "name")) snprintf(d->name, sizeof d->name, "%s", rest);
    else if (!strcmp(key, "uuid")) snprintf(d->uuid, sizeof d->uuid, "%s", rest);
    else if (!strcmp(key, "bus_id")) snprintf(d->bus_id, sizeof d->bus_id, "%s", rest);
    else if (!strcmp(key, "compute_partition")) snprintf(d->compute_partition, sizeof d->compute_partition, "%s", rest);
    else if (!strcmp(key, "memory_partition")) snprintf(d->memory_partition, sizeof d->memory_partition, "%s", rest);
    else if (!strcmp(key, "lost")) d->lost = 1;
    else if (!strcmp(key, "process")) {
        if (d->process_count == MAX_PROCESSES) refuse(line, "too many processes");
        struct process *p = &d->processes[d->process_count++];
        int found = sscanf(rest, "%u %llu %7s %u", &p->pid, &p->bytes, p->type, &p->sm);
        if (found < 3) refuse(line, rest);
        p->has_sm = found == 4;
    } else if (!read_rule(&d->rules, key, rest, line)) refuse(line, key);
}
static void parse(FILE *file, struct scenario *s) {
    char line[512], key[64];
    int number = 0, gpu = -1;
    memset(s, 0, sizeof *s);
    while (fgets(line, sizeof line, file)) {
        number++;
        line[strcspn(line, "\n")] = 0;
        int used = 0;
        if (sscanf(line, " %63s %n", key, &used) < 1 || *key == '#') continue;
        if (!strcmp(key, "gpu") || !strcmp(key, "mig")) {
            if (s->count == MAX_DEVICES) refuse(number, "too many devices");
            if (*key == 'm' && gpu < 0) refuse(number, "mig before any gpu");
            s->devices[s->count].parent = *key == 'm' ? gpu : -1;
            if (*key == 'g') gpu = s->count;
            s->count++;
        } else if (gpu < 0) read_system_line(s, key, line + used, number);
        else read_device_line(&s->devices[s->count - 1], key, line + used, number);
    }
}
static void read_scenario(void) {                                        /* with `guard` held */
    const char *path = getenv(STUB "_STUB_SCENARIO");
    struct stat found;
    if (!path || stat(path, &found)) return;
    if (found.st_ino == last_read.st_ino && found.st_size == last_read.st_size &&
        found.st_mtim.tv_sec == last_read.st_mtim.tv_sec && found.st_mtim.tv_nsec == last_read.st_mtim.tv_nsec) return;
    FILE *file = fopen(path, "r");
    if (!file) return;
    parse(file, &next);
    fclose(file);
    now = next;
    last_read = found;
}

/* ---- counting calls ---- */

static void count_call(const char *function) {                           /* with `guard` held */
    static char *lines, opened[256];
    static u64 counts[MAX_FUNCTIONS];
    static const char *names[MAX_FUNCTIONS];
    static int used;
    const char *path = getenv(STUB "_STUB_CALLS");
    if (!path) return;
    if (strcmp(path, opened)) {
        int file = open(path, O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
        if (file < 0 || ftruncate(file, MAX_FUNCTIONS * CALL_LINE)) refuse(0, STUB "_STUB_CALLS cannot be written");
        if (lines) munmap(lines, MAX_FUNCTIONS * CALL_LINE);
        lines = mmap(NULL, MAX_FUNCTIONS * CALL_LINE, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
        memset(lines, '\n', MAX_FUNCTIONS * CALL_LINE);
        memset(counts, 0, sizeof counts);
        used = 0;
        close(file);
        snprintf(opened, sizeof opened, "%s", path);
    }
    int i = 0;
    while (i < used && strcmp(names[i], function)) i++;
    if (i == used) names[used++] = function;
    char text[CALL_LINE + 1];
    snprintf(text, sizeof text, "%-50s %12llu\n", function, ++counts[i]);
    memcpy(lines + i * CALL_LINE, text, CALL_LINE);
}

/* ---- every call passes here ---- */

static struct device *find(const char *uuid) {                           /* with `guard` held */
    for (int i = 0; i < now.count; i++)
        if (!strcmp(now.devices[i].uuid, uuid)) return &now.devices[i];
    return NULL;
}
static int combined_rule(const char *function, nvmlDevice_t handle, struct rule *rule) {
    struct device *device = handle ? find(handle->uuid) : NULL;
    struct rules *sources[] = {&now.rules, device ? &device->rules : NULL};
    memset(rule, 0, sizeof *rule);
    for (int s = 0; s < 2; s++)
        for (int i = 0; sources[s] && i < sources[s]->count; i++)
            if (!strcmp(sources[s]->rule[i].function, function)) *rule = sources[s]->rule[i];
    return rule->hang;
}
static void wait_ms(double ms) {
    struct timespec time = {(time_t)(ms / 1000), (long)((ms - 1000 * (double)(long)(ms / 1000)) * 1e6)};
    nanosleep(&time, NULL);
}
static nvmlReturn_t fate(const char *function, nvmlDevice_t handle) {    /* waits as told, then: what to answer */
    struct rule rule;
    pthread_mutex_lock(&guard);
    read_scenario();
    count_call(function);
    int alone = now.lock;
    pthread_mutex_unlock(&guard);
    if (alone) pthread_mutex_lock(&one_call);
    for (int hangs = 1, first = 1; hangs; first = 0) {
        pthread_mutex_lock(&guard);
        read_scenario();
        hangs = combined_rule(function, handle, &rule);
        pthread_mutex_unlock(&guard);
        if (hangs || (first && rule.latency_ms > 0)) wait_ms(hangs ? 10 : rule.latency_ms);
    }
    if (alone) pthread_mutex_unlock(&one_call);
    return rule.code;
}
static nvmlReturn_t begin_system(const char *function) {
    nvmlReturn_t code = fate(function, NULL);
    if (code) return code;
    pthread_mutex_lock(&guard);
    code = !init_count ? UNINITIALIZED : now.generation != init_generation ? UNKNOWN : SUCCESS;
    pthread_mutex_unlock(&guard);
    return code;
}
static nvmlReturn_t begin(const char *function, nvmlDevice_t handle, struct device *copy) {
    nvmlReturn_t code = fate(function, handle);
    if (code) return code;
    if (!handle) return INVALID_ARGUMENT;
    pthread_mutex_lock(&guard);
    struct device *device = find(handle->uuid);
    if (!init_count) code = UNINITIALIZED;
    else if (now.generation != init_generation) code = UNKNOWN;
    else if (!device) code = strncmp(handle->uuid, "MIG-", 4) ? LOST : INVALID_ARGUMENT;
    else if (device->lost || (device->parent >= 0 && now.devices[device->parent].lost)) code = LOST;
    else *copy = *device;
    pthread_mutex_unlock(&guard);
    return code;
}
