/* A CUDA driver without a device: device memory is memory of the host, memory made for sharing is
 * a memfd that another process maps, and the kernels of byte_kernels.ptx are C functions. So are the
 * kernels of tests/child/test_without_torch.py, by their names: Triton launches what it has compiled.
 *
 * LIBCUDA_MEMORY   bytes of each device; 1 GiB without it
 * LIBCUDA_FAIL     function=error,...: calls that fail
 * LIBCUDA_WITHOUT  an attribute that every device lacks
 * LIBCUDA_LOG      a file that gets a line, "pid function", for cuInit, each launch of Triton's and
 *                  each call that shares
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

typedef int Result;
typedef uint64_t Address;
enum {
    OK = 0,
    INVALID_VALUE = 1,
    OUT_OF_MEMORY = 2,
    INVALID_CONTEXT = 201,
    NOT_FOUND = 500,
    NOT_READY = 600,
    CAPTURE_UNSUPPORTED = 900
};

static __thread int64_t contexts[16] = {-1};
static __thread int depth = 0;
static int64_t used[16];
static Result sticky = OK; /* what a kernel has done to the context */

static int64_t current(void) { return contexts[depth]; }

static void note(const char *function) {
    const char *path = getenv("LIBCUDA_LOG");
    int fd = path ? open(path, O_WRONLY | O_APPEND | O_CREAT, 0600) : -1;
    if (fd >= 0) {
        dprintf(fd, "%d %s\n", getpid(), function);
        close(fd);
    }
}

static Result failing(const char *function) {
    const char *text = getenv("LIBCUDA_FAIL");
    size_t length = strlen(function);
    for (; text; text = strchr(text, ',') ? strchr(text, ',') + 1 : NULL)
        if (!strncmp(text, function, length) && text[length] == '=') return atoi(text + length + 1);
    return OK;
}

#define BEGIN                                   \
    Result failed = failing(__func__);          \
    if (failed) return failed
#define BEGIN_ON_DEVICE                         \
    BEGIN;                                      \
    if (current() < 0) return INVALID_CONTEXT;  \
    if (sticky) return sticky

/* Time, in ms. Everything is done when its call returns, but events take place as if the device
 * worked beside the host: its work begins once it is queued and what is before it is over. */

static double done_at[16]; /* when a device has nothing left to do */
static double worked;      /* the time of this process that counts as a device's */
static double set_clock = -1;
static double flush_ms = 256.0 * (1 << 20) / 2.5e9;
#define FLUSH (100u << 20) /* as large as caches are flushed by, and then nothing reads it */

static double real_clock(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1e3 + now.tv_nsec * 1e-6;
}
static double on_host(void) { return set_clock < 0 ? real_clock() - worked : set_clock; }
static double *done_here(void) {
    double *done = &done_at[current() - 1000], now = on_host();
    if (*done < now) *done = now;
    return done;
}
static void wait_for_device(void) {
    double ahead = *done_here() - on_host();
    if (set_clock < 0) worked -= ahead;
    else set_clock += ahead;
}
static void worked_since(double began, double ms) {
    worked += real_clock() - began;
    *done_here() += ms > 0 ? ms : real_clock() - began;
}
double stub_clock(double later) { /* the clock of the host, which stands still from here on */
    return set_clock = on_host() + later;
}
void stub_real_clock(void) {
    set_clock = -1;
    flush_ms = 256.0 * (1 << 20) / 2.5e9;
    memset(done_at, 0, sizeof done_at);
}
void stub_queue(double ms) { *done_here() += ms; }
void stub_flush(double ms) { flush_ms = ms; } /* how long a flush takes */

static int64_t total(void) {
    const char *text = getenv("LIBCUDA_MEMORY");
    return text ? atoll(text) : 1LL << 30;
}

Result cuInit(unsigned flags) { BEGIN; note(__func__); return OK; }
Result cuDeviceGetCount(int *count) { BEGIN; *count = 2; return OK; }
Result cuDeviceGet(int *device, int index) { BEGIN; *device = index; return OK; }
Result cuDeviceGetName(char *name, int size, int device) {
    snprintf(name, size, "Stub");
    return OK;
}
Result cuDeviceGetUuid_v2(unsigned char *uuid, int device) {
    memset(uuid, device + 1, 16);
    return OK;
}
Result cuDeviceGetAttribute(int *value, int attribute, int device) {
    BEGIN;
    const char *without = getenv("LIBCUDA_WITHOUT");
    int shares = attribute == 102 || attribute == 103;
    *value = shares && !(without && atoi(without) == attribute);
    if (attribute == 75) *value = 9;        /* compute capability, major */
    if (attribute == 10) *value = 32;       /* warp size */
    if (attribute == 97) *value = 232448;   /* shared memory of a block */
    if (attribute == 82) *value = 65536;    /* registers */
    if (attribute == 16) *value = 132;      /* multiprocessors */
    if (attribute == 38) *value = FLUSH / 2; /* L2 cache */
    return OK;
}
Result cuDevicePrimaryCtxRetain(int64_t *context, int device) {
    BEGIN;
    *context = device + 1000;
    return OK;
}
Result cuCtxSetCurrent(int64_t context) { BEGIN; contexts[depth] = context; return OK; }
Result cuCtxPushCurrent_v2(int64_t context) { BEGIN; contexts[++depth] = context; return OK; }
Result cuCtxPopCurrent_v2(int64_t *context) { *context = contexts[depth--]; return OK; }
Result cuCtxGetCurrent(int64_t *context) { *context = current() < 0 ? 0 : current(); return OK; }
Result cuCtxSynchronize(void) { BEGIN_ON_DEVICE; wait_for_device(); return OK; }
Result cuGetErrorName(Result error, const char **name) {
    static __thread char text[40];
    snprintf(text, sizeof text, "CUDA_ERROR_%d", error);
    *name = error == OUT_OF_MEMORY ? "CUDA_ERROR_OUT_OF_MEMORY" : text;
    return OK;
}
Result cuThreadExchangeStreamCaptureMode(int *mode) { *mode = 0; return OK; }
Result cuStreamGetCaptureInfo_v2(void *stream, int *status, uint64_t *id, void *a, void *b, void *c) {
    *status = 0;
    return OK;
}

/* Memory */

static int64_t *used_here(void) { return &used[current() - 1000]; }
static Result take(int64_t size) {
    if (*used_here() + size > total()) return OUT_OF_MEMORY;
    *used_here() += size;
    return OK;
}
int64_t stub_used(int device) { return used[device]; }

Result cuMemGetInfo_v2(size_t *left, size_t *all) {
    BEGIN_ON_DEVICE;
    *left = total() - *used_here();
    *all = total();
    return OK;
}
static struct Graph *capturing; /* what launches on the stream that is captured are added to */
Result cuMemAlloc_v2(Address *address, size_t size) {
    if (capturing) return CAPTURE_UNSUPPORTED;
    BEGIN_ON_DEVICE;
    if (take(size)) return OUT_OF_MEMORY;
    size_t *memory = aligned_alloc(512, (size + 1023) / 512 * 512);
    *memory = size;
    memset((char *)memory + 512, 0xEE, size);
    *address = (Address)memory + 512;
    return OK;
}
Result cuMemFree_v2(Address address) {
    BEGIN_ON_DEVICE;
    size_t *memory = (size_t *)(address - 512);
    *used_here() -= *memory;
    free(memory);
    return OK;
}
Result cuMemHostAlloc(void **memory, size_t size, unsigned flags) {
    BEGIN_ON_DEVICE;
    *memory = aligned_alloc(4096, (size + 4095) / 4096 * 4096);
    return OK;
}
Result cuMemFreeHost(void *memory) { BEGIN_ON_DEVICE; free(memory); return OK; }

/* Memory of the host that the program has pinned, in place of the driver's own list. */
static struct { Address start, end; } pinned[16];
static int pinned_count;
Result cuMemHostRegister_v2(void *memory, size_t size, unsigned flags) {
    BEGIN_ON_DEVICE;
    if (pinned_count == 16) return INVALID_VALUE;
    pinned[pinned_count].start = (Address)memory;
    pinned[pinned_count++].end = (Address)memory + size;
    return OK;
}
Result cuPointerGetAttribute(Address *data, int attribute, Address address) {
    for (int i = 0; attribute == 2 && i < pinned_count; i++) { /* the type of the memory */
        if (address < pinned[i].start || address >= pinned[i].end) continue;
        *(unsigned *)data = 1; /* of the host */
        return OK;
    }
    if (attribute != 3) return INVALID_VALUE; /* the address on the device */
    *data = address;
    return OK;
}

#define COPY(name, ...)                                         \
    Result name(Address to, Address from, size_t size, ##__VA_ARGS__) { \
        BEGIN_ON_DEVICE;                                        \
        memmove((void *)to, (void *)from, size);                \
        return OK;                                              \
    }
COPY(cuMemcpyAsync, void *stream)
COPY(cuMemcpyHtoDAsync_v2, void *stream)
COPY(cuMemcpyDtoHAsync_v2, void *stream)
COPY(cuMemcpyDtoH_v2)
COPY(cuMemcpyHtoD_v2)

#define FILL(bits)                                                                         \
    Result cuMemsetD##bits##Async(Address at, uint##bits##_t value, size_t count, void *stream) { \
        BEGIN_ON_DEVICE;                                                                   \
        size_t size = count * (bits / 8);                                                  \
        double began = real_clock();                                                       \
        for (size_t i = 0; i < count && size < FLUSH; i++) ((uint##bits##_t *)at)[i] = value; \
        worked_since(began, size < FLUSH ? size / 2.5e9 : flush_ms);                       \
        return OK;                                                                         \
    }
FILL(8)
FILL(16)
FILL(32)

/* Memory made for sharing: a handle is a file descriptor of this process and one more. */

#define GRANULARITY (2u << 20)
static int64_t sizes[4096];

Result cuMemGetAllocationGranularity(size_t *size, const void *wanted, int option) {
    BEGIN;
    *size = GRANULARITY;
    return OK;
}
Result cuMemCreate(uint64_t *handle, size_t size, const int *wanted, uint64_t flags) {
    BEGIN_ON_DEVICE;
    note(__func__);
    if (size % GRANULARITY || wanted[0] != 1 || wanted[1] != 1 || wanted[2] != 1)
        return INVALID_VALUE;
    if (take(size)) return OUT_OF_MEMORY;
    int fd = memfd_create("libcuda-shared", MFD_CLOEXEC);
    if (fd < 0 || ftruncate(fd, size)) return OUT_OF_MEMORY;
    sizes[fd] = size;
    *handle = fd + 1;
    return OK;
}
Result cuMemRelease(uint64_t handle) {
    BEGIN_ON_DEVICE;
    note(__func__);
    *used_here() -= sizes[handle - 1];
    sizes[handle - 1] = 0;
    close(handle - 1);
    return OK;
}
Result cuMemExportToShareableHandle(int *fd, uint64_t handle, int type, uint64_t flags) {
    BEGIN_ON_DEVICE;
    note(__func__);
    *fd = dup(handle - 1);
    return OK;
}
Result cuMemImportFromShareableHandle(uint64_t *handle, uint64_t fd, int type) {
    BEGIN_ON_DEVICE;
    note(__func__);
    int own = fcntl(fd, F_DUPFD_CLOEXEC, 0);
    if (own < 0) return INVALID_VALUE;
    sizes[own] = 0;
    *handle = own + 1;
    return OK;
}
Result cuMemAddressReserve(Address *address, size_t size, size_t a, Address at, uint64_t flags) {
    BEGIN_ON_DEVICE;
    void *memory = mmap(NULL, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    *address = (Address)memory;
    return memory == MAP_FAILED ? OUT_OF_MEMORY : OK;
}
Result cuMemMap(Address at, size_t size, size_t offset, uint64_t handle, uint64_t flags) {
    BEGIN_ON_DEVICE;
    void *memory = mmap((void *)at, size, PROT_NONE, MAP_SHARED | MAP_FIXED, handle - 1, offset);
    return memory == MAP_FAILED ? INVALID_VALUE : OK;
}
Result cuMemSetAccess(Address at, size_t size, const int *access, size_t count) {
    BEGIN_ON_DEVICE;
    int protection = access[2] == 3 ? PROT_READ | PROT_WRITE : PROT_READ;
    return mprotect((void *)at, size, protection) ? INVALID_VALUE : OK;
}
Result cuMemUnmap(Address at, size_t size) {
    BEGIN_ON_DEVICE;
    int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED;
    return mmap((void *)at, size, PROT_NONE, flags, -1, 0) == MAP_FAILED;
}
Result cuMemAddressFree(Address at, size_t size) { BEGIN_ON_DEVICE; return munmap((void *)at, size); }

/* Streams and events */

Result cuStreamCreate(uint64_t *stream, unsigned flags) { BEGIN_ON_DEVICE; *stream = 77; return OK; }
Result cuStreamSynchronize(void *stream) { BEGIN_ON_DEVICE; return OK; }
Result cuStreamWaitEvent(void *stream, void *event, unsigned flags) { BEGIN_ON_DEVICE; return OK; }
Result cuEventCreate(double **event, unsigned flags) {
    BEGIN_ON_DEVICE;
    *event = calloc(1, sizeof(double));
    return OK;
}
Result cuEventRecord(double *event, void *stream) {
    BEGIN_ON_DEVICE;
    *event = *done_here();
    return OK;
}
Result cuEventQuery(double *event) { BEGIN_ON_DEVICE; return *event <= on_host() ? OK : NOT_READY; }
Result cuEventSynchronize(void *event) { BEGIN_ON_DEVICE; return OK; }
Result cuEventElapsedTime(float *ms, double *start, double *end) {
    BEGIN_ON_DEVICE;
    *ms = *end - *start;
    return OK;
}
Result cuEventDestroy_v2(double *event) { BEGIN_ON_DEVICE; free(event); return OK; }

/* Kernels */

typedef struct { char name[40]; } Function;

Result cuModuleLoadData(char **module, const char *image) {
    BEGIN_ON_DEVICE;
    *module = strdup(image);
    return OK;
}
Result cuModuleGetFunction(Function **function, const char *module, const char *name) {
    BEGIN_ON_DEVICE;
    char entry[64];
    snprintf(entry, sizeof entry, ".entry %s(", name);
    if (memcmp(module, "\x7f" "ELF", 4) && !strstr(module, entry)) return NOT_FOUND;
    *function = calloc(1, sizeof(Function));
    snprintf((*function)->name, sizeof (*function)->name, "%s", name);
    return OK;
}

static uint64_t mixed(uint64_t x) {
    x ^= x >> 32;
    x *= 0xD6E8FEB86659FD93u;
    x ^= x >> 32;
    return x * 0xD6E8FEB86659FD93u;
}

static uint64_t get(const char *base, int width, int64_t place) {
    uint64_t value = 0;
    memcpy(&value, base + place * width, width);
    return value;
}

static double number(const char *base, const char *type, int64_t place) {
    if (!strcmp(type, "float64")) return ((const double *)base)[place];
    if (!strcmp(type, "float32")) return ((const float *)base)[place];
    if (!strcmp(type, "float16")) return ((const _Float16 *)base)[place];
    uint32_t bits = (uint32_t)((const uint16_t *)base)[place] << 16;
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

static void put(char *base, const char *type, int64_t place, double value) {
    if (!strcmp(type, "float64")) ((double *)base)[place] = value;
    else if (!strcmp(type, "float32")) ((float *)base)[place] = value;
    else if (!strcmp(type, "float16")) ((_Float16 *)base)[place] = value;
    else {
        float single = value;
        uint32_t bits;
        memcpy(&bits, &single, 4);
        ((uint16_t *)base)[place] = bits >> 16;
    }
}

static int64_t offset(int64_t element, const int64_t *dims, int64_t rank, int64_t step) {
    int64_t found = 0;
    for (int64_t d = 0; d < rank; d++) {
        found += element % dims[2 * d] * dims[2 * d + 1];
        element /= dims[2 * d];
    }
    return found + element * step;
}

#define WORD(i) (*(uint64_t *)parameters[i])
#define NUMBER(i) (*(double *)parameters[i])
#define POINTER(i) ((void *)WORD(i))

static void add_checksum(void **parameters) {
    uint64_t *words = POINTER(0), count = WORD(1), total = 0;
    for (uint64_t i = 0; i < count; i++) {
        uint64_t word = words[i];
        if (i == 0) word &= WORD(2);
        if (i == 1) word &= WORD(3);
        if (i == count - 1) word &= WORD(4);
        total += mixed(word + i * 0x9E3779B97F4A7C15u);
    }
    *(uint64_t *)POINTER(5) += total;
}

static void over_view(const char *kind, int width, void **parameters) {
    char *base = POINTER(0);
    for (int64_t k = 0; k < (int64_t)WORD(4); k++) {
        int picked = !strcmp(kind, "gather") || !strcmp(kind, "scatter");
        int64_t element = picked ? ((int64_t *)POINTER(5))[k] : k;
        int64_t place = offset(element, POINTER(1), WORD(2), WORD(3));
        uint64_t mask = width == 8 ? ~0ull : (1ull << 8 * width) - 1;
        if (!strcmp(kind, "fill")) memcpy(base + place * width, parameters[5], width);
        if (!strcmp(kind, "unlike") && get(base, width, place) != (WORD(5) & mask))
            ++*(int64_t *)POINTER(6);
        if (!strcmp(kind, "gather")) ((uint64_t *)POINTER(6))[k] = get(base, width, place);
        if (!strcmp(kind, "scatter"))
            memcpy(base + place * width, (uint64_t *)POINTER(6) + k, width);
    }
}

static void add_beyond(const char *type, void **parameters) {
    for (int64_t k = 0; k < (int64_t)WORD(5); k++) {
        int64_t place = offset(k, POINTER(2), WORD(3), WORD(4));
        double a = number(POINTER(0), type, place), b = number(POINTER(1), type, place);
        double distance = fabs(a - b), limit = fmax(NUMBER(6) * fabs(b), NUMBER(7));
        int same = a == b || (isnan(a) && isnan(b));
        if (!same && !(distance <= limit && distance < INFINITY)) ++*(int64_t *)POINTER(8);
    }
}

static void draw(const char *type, void **parameters) {
    for (int64_t k = 0; k < (int64_t)WORD(1); k++) {
        double sum = -6.0;
        for (int term = 0; term < 12; term++)
            sum += (mixed(mixed(WORD(2) * 12 + term) + k) >> 11) * 0x1p-53;
        double value = sum * NUMBER(4) + NUMBER(3);
        put(POINTER(0), type, k, fmin(fmax(value, NUMBER(5)), NUMBER(6)));
    }
}

Result cuLaunchKernel(Function *function, unsigned gx, unsigned gy, unsigned gz, unsigned x,
                      unsigned y, unsigned z, unsigned shared, void *stream, void **parameters,
                      void **extra) {
    BEGIN_ON_DEVICE;
    double began = real_clock();
    char kind[40];
    snprintf(kind, sizeof kind, "%s", function->name);
    char *suffix = strchr(kind, '_');
    if (suffix) *suffix++ = 0;
    if (!strcmp(kind, "checksum")) add_checksum(parameters);
    else if (!strcmp(kind, "beyond")) add_beyond(suffix, parameters);
    else if (!strcmp(kind, "draw")) draw(suffix, parameters);
    else over_view(kind, atoi(suffix), parameters);
    worked_since(began, 0);
    return OK;
}

/* What Triton asks for besides */

Result cuCtxGetDevice(int *device) { *device = current() - 1000; return OK; }
Result cuCtxGetLimit(size_t *value, int limit) { *value = 0; return OK; }
Result cuCtxSetLimit(int limit, size_t value) { return OK; }
Result cuDriverGetVersion(int *version) { *version = 12080; return OK; }
Result cuGetErrorString(Result error, const char **text) { return cuGetErrorName(error, text); }
Result cuModuleUnload(void *module) { return OK; }
Result cuStreamIsCapturing(void *stream, int *status) { *status = 0; return OK; }
Result cuFuncSetAttribute(void *function, int attribute, int value) { return OK; }
Result cuFuncSetCacheConfig(void *function, int config) { return OK; }
Result cuOccupancyMaxActiveClusters(int *count, void *function, void *config) {
    *count = 1;
    return OK;
}
Result cuTensorMapEncodeTiled(uint64_t *map, int type, unsigned rank, Address address) {
    memset(map, 0, 128);
    map[0] = address;
    return OK;
}
Result cuTensorMapEncodeIm2col(uint64_t *map, int type, unsigned rank, Address address) {
    return cuTensorMapEncodeTiled(map, type, rank, address);
}
Result cuFuncGetAttribute(int *value, int attribute, void *function) {
    BEGIN;
    *value = attribute == 0 ? 1024 : 0; /* threads of a block */
    return OK;
}
/* A launch of Triton's, and a graph of them */
typedef struct {
    char name[40];
    unsigned programs; /* of the first dimension */
    float *out, *in;
    int count;
    void *scratch;
} Launch;
struct Graph {
    int count;
    Launch launches[512];
};
enum { STREAM = 77 }; /* every stream but the default one */

static Result start(const Launch *launch) {
    double began = real_clock();
    const char *name = launch->name;
    float *out = launch->out, *in = launch->in;
    if (!strncmp(name, "scratch_", 8)) memset(launch->scratch, 0x5A, 128);
    float more = !strncmp(name, "grid_", 5) ? launch->programs : 0;
    for (int i = 0; i < launch->count; i++)
        out[i] = in[i] + more + (!strncmp(name, "add_", 4) ? out[i] : 0);
    if (!strncmp(name, "near_", 5)) /* as a sum in another order */
        for (int i = 0; i < launch->count; i++) out[i] *= 1 + 1e-6f * launch->programs;
    if (!strncmp(name, "spill_", 6)) out[launch->count] = 7;
    if (!strncmp(name, "fail_", 5)) sticky = 700;
    worked_since(began, 0);
    return OK;
}
Result cuLaunchKernelEx(const unsigned *config, Function *function, void **parameters, void **extra) {
    BEGIN_ON_DEVICE;
    note(__func__);
    Launch launch = {.programs = config[0], .out = POINTER(0), .in = POINTER(1)};
    snprintf(launch.name, sizeof launch.name, "%s", function->name);
    launch.count = *(int *)parameters[2];
    if (!strncmp(launch.name, "scratch_", 8)) launch.scratch = POINTER(3);
    uint64_t stream = ((const uint64_t *)config)[4];
    if (!capturing || stream != STREAM) return start(&launch);
    capturing->launches[capturing->count++] = launch;
    return OK;
}
Result cuStreamBeginCapture_v2(uint64_t stream, int mode) {
    BEGIN_ON_DEVICE;
    if (stream != STREAM || mode != 1 || capturing) return INVALID_VALUE;
    capturing = calloc(1, sizeof *capturing);
    return OK;
}
Result cuStreamEndCapture(uint64_t stream, struct Graph **graph) {
    *graph = capturing;
    capturing = NULL;
    BEGIN_ON_DEVICE;
    return OK;
}
Result cuGraphInstantiateWithFlags(struct Graph **made, const struct Graph *graph, uint64_t flags) {
    BEGIN_ON_DEVICE;
    *made = memcpy(malloc(sizeof *graph), graph, sizeof *graph);
    return OK;
}
Result cuGraphDestroy(struct Graph *graph) { free(graph); return OK; }
Result cuGraphExecDestroy(struct Graph *graph) { free(graph); return OK; }
Result cuGraphLaunch(struct Graph *graph, uint64_t stream) {
    BEGIN_ON_DEVICE;
    note(__func__);
    *done_here() += 0.01;
    for (int i = 0; i < graph->count; i++) start(&graph->launches[i]);
    return OK;
}
