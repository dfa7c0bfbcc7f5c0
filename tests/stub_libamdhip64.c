/* Stands for libamdhip64.so: one device whose memory is the host's, typed by HIP's own header.

   It runs no code of the GPU. Of the kernels that tests launch it knows the names, and does in C
   what they do; a launch takes as long as it has threads. With ABORTS threads it ends as ROCm
   ends a process after an exception of the device; with WRONG threads it computes something else. */
#define _GNU_SOURCE
#define __HIP_PLATFORM_AMD__
#include <dlfcn.h>
#include <hip/hip_runtime_api.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { WRONG = 512, ABORTS = 1024 };

static double clock_ms;
static const size_t TOTAL = 64ull << 30;

hipError_t hipInit(unsigned int flags) {
    const char *log = getenv("STUB_HIP_LOG");
    FILE *file = log ? fopen(log, "a") : NULL;
    if (file) {
        fprintf(file, "%d %s\n", getpid(), getenv("ROCR_VISIBLE_DEVICES"));
        fclose(file);
    }
    return hipSuccess;
}

hipError_t hipDriverGetVersion(int *version) { *version = 60300000; return hipSuccess; }
hipError_t hipGetDeviceCount(int *count) { *count = 1; return hipSuccess; }
hipError_t hipGetDevice(int *device) { *device = 0; return hipSuccess; }
hipError_t hipSetDevice(int device) { return device ? hipErrorInvalidDevice : hipSuccess; }
hipError_t hipDeviceSynchronize(void) { return hipSuccess; }
hipError_t hipGetLastError(void) { return hipSuccess; }
const char *hipGetErrorString(hipError_t error) { return "an error of the stub"; }

hipError_t hipDeviceGet(hipDevice_t *device, int index) {
    *device = index;
    return hipSetDevice(index);
}

hipError_t hipDeviceGetName(char *name, int size, hipDevice_t device) {
    snprintf(name, size, "Stub of an AMD GPU");
    return hipSuccess;
}

hipError_t hipDeviceGetUuid(hipUUID *uuid, hipDevice_t device) {
    memcpy(uuid->bytes, "0123456789abcdef", 16);
    return hipSuccess;
}

hipError_t hipGetDeviceProperties(hipDeviceProp_t *found, int device) {
    memset(found, 0, sizeof *found);
    found->multiProcessorCount = 304;
    found->sharedMemPerBlock = 65536;
    found->warpSize = 64;
    found->maxThreadsPerMultiProcessor = 2048;
    strcpy(found->gcnArchName, "gfx942:sramecc+:xnack-");
    return hipSetDevice(device);
}

hipError_t hipDrvGetErrorName(hipError_t error, const char **name) {
    *name = error == hipErrorOutOfMemory   ? "hipErrorOutOfMemory"
            : error == hipErrorInvalidDevice ? "hipErrorInvalidDevice"
                                             : "hipErrorUnknown";
    return hipSuccess;
}

hipError_t hipMemGetInfo(size_t *free, size_t *total) {
    *free = *total = TOTAL;
    return hipSuccess;
}

hipError_t hipMalloc(void **memory, size_t size) {
    *memory = size < TOTAL ? aligned_alloc(256, (size + 255) / 256 * 256) : NULL;
    return *memory ? hipSuccess : hipErrorOutOfMemory;
}

hipError_t hipHostMalloc(void **memory, size_t size, unsigned int flags) {
    return hipMalloc(memory, size);
}

hipError_t hipFree(void *memory) { free(memory); return hipSuccess; }
hipError_t hipHostFree(void *memory) { return hipFree(memory); }

hipError_t hipMemcpyAsync(void *to, const void *from, size_t size, hipMemcpyKind kind,
                          hipStream_t stream) {
    if (kind != hipMemcpyDefault) return hipErrorInvalidMemcpyDirection;
    memmove(to, from, size);
    return hipSuccess;
}

hipError_t hipMemcpyHtoD(hipDeviceptr_t to, const void *from, size_t size) {
    return hipMemcpyAsync(to, from, size, hipMemcpyDefault, NULL);
}

hipError_t hipMemcpyDtoH(void *to, hipDeviceptr_t from, size_t size) {
    return hipMemcpyAsync(to, from, size, hipMemcpyDefault, NULL);
}

hipError_t hipMemsetD8Async(hipDeviceptr_t to, unsigned char value, size_t count,
                            hipStream_t stream) {
    memset(to, value, count);
    return hipSuccess;
}

/* The flush of a cache that is not there: nothing reads what it writes. */
hipError_t hipMemsetD32Async(hipDeviceptr_t to, int value, size_t count, hipStream_t stream) {
    return hipSuccess;
}

hipError_t hipPointerGetAttribute(void *found, hipPointer_attribute attribute,
                                  hipDeviceptr_t address) {
    return hipSuccess;
}

hipError_t hipThreadExchangeStreamCaptureMode(hipStreamCaptureMode *mode) { return hipSuccess; }

hipError_t hipStreamGetCaptureInfo_v2(hipStream_t stream, hipStreamCaptureStatus *status,
                                      unsigned long long *id, hipGraph_t *graph,
                                      const hipGraphNode_t **nodes, size_t *count) {
    *status = hipStreamCaptureStatusNone;
    return hipSuccess;
}

hipError_t hipEventCreateWithFlags(hipEvent_t *event, unsigned int flags) {
    *event = malloc(sizeof(double));
    return hipSuccess;
}

hipError_t hipEventRecord(hipEvent_t event, hipStream_t stream) {
    *(double *)event = clock_ms;
    return hipSuccess;
}

hipError_t hipEventQuery(hipEvent_t event) { return hipErrorNotReady; } /* the host is ahead */
hipError_t hipEventElapsedTime(float *ms, hipEvent_t start, hipEvent_t end) {
    *ms = *(double *)end - *(double *)start;
    return hipSuccess;
}

hipError_t hipEventDestroy(hipEvent_t event) { free(event); return hipSuccess; }

hipError_t hipModuleLoadDataEx(hipModule_t *module, const void *image, unsigned int count,
                               hipJitOption *options, void **values) {
    *module = NULL;
    return memcmp(image, "\177ELF", 4) ? hipErrorNoBinaryForGpu : hipSuccess;
}

hipError_t hipModuleUnload(hipModule_t module) { return hipSuccess; }

hipError_t hipModuleGetFunction(hipFunction_t *function, hipModule_t module, const char *name) {
    *function = (hipFunction_t)strdup(name);
    return hipSuccess;
}

hipError_t hipFuncGetAttribute(int *value, hipFunction_attribute attribute, hipFunction_t function) {
    *value = attribute == HIP_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024 : 0;
    return hipSuccess;
}

/* `doubled`: y[i] = 2 * x[i]. */
hipError_t hipModuleLaunchKernel(hipFunction_t function, unsigned int x, unsigned int y,
                                 unsigned int z, unsigned int threads, unsigned int threads_y,
                                 unsigned int threads_z, unsigned int shared, hipStream_t stream,
                                 void **parameters, void **extra) {
    if (strcmp((const char *)function, "doubled")) return hipErrorInvalidDeviceFunction;
    if (threads == ABORTS) {
        if (!getenv("HSA_DISABLE_COREDUMP_ON_EXCEPTION")) fprintf(stderr, "GPU coredump\n");
        fprintf(stderr, "HW Exception by GPU node-1 (Agent handle: 0x5581) reason :GPU Hang\n");
        abort();
    }
    const float *from = *(float **)parameters[0];
    float *to = *(float **)parameters[1];
    int count = *(int *)parameters[2];
    for (int i = 0; i < count; i++) to[i] = (threads == WRONG ? 3 : 2) * from[i];
    clock_ms += threads / 64.0;
    return hipSuccess;
}

hipError_t hipModuleLaunchCooperativeKernel(hipFunction_t function, unsigned int x, unsigned int y,
                                            unsigned int z, unsigned int threads,
                                            unsigned int threads_y, unsigned int threads_z,
                                            unsigned int shared, hipStream_t stream,
                                            void **parameters) {
    return hipErrorNotSupported;
}

hipError_t hipGetProcAddress(const char *name, void **found, int version, uint64_t flags,
                             hipDriverProcAddressQueryResult *result) {
    Dl_info own;
    dladdr((void *)hipInit, &own);
    *found = strcmp(name, "hipGetDeviceProperties")
                 ? dlsym(dlopen(own.dli_fname, RTLD_NOW | RTLD_NOLOAD), name)
                 : (void *)hipGetDeviceProperties;
    return *found ? hipSuccess : hipErrorNotFound;
}
