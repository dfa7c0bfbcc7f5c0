/* Stands for libcuda.so.1: one device, and the pid of each process that calls cuInit in a file. */
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

enum { NOT_INITIALIZED = 3, INVALID_DEVICE = 101 };

static int started;

int cuInit(unsigned int flags) {
    int file = open(getenv("STUB_CUDA_LOG"), O_WRONLY | O_APPEND | O_CREAT, 0600);
    dprintf(file, "%d\n", getpid());
    close(file);
    started = 1;
    return 0;
}

int cuDeviceGetCount(int *count) {
    *count = 1;
    return started ? 0 : NOT_INITIALIZED;
}

int cuDeviceGet(int *device, int index) {
    *device = index;
    return started ? index ? INVALID_DEVICE : 0 : NOT_INITIALIZED;
}

int cuDeviceGetName(char *name, int size, int device) {
    snprintf(name, size, "Stub");
    return 0;
}

/* 16: multiprocessors, 75 and 76: capability, 97: shared memory of a block. */
int cuDeviceGetAttribute(int *value, int attribute, int device) {
    *value = attribute == 16 ? 132 : attribute == 75 ? 9 : attribute == 97 ? 232448 : 0;
    return 0;
}

int cuGetErrorName(int error, const char **name) {
    *name = error == INVALID_DEVICE ? "CUDA_ERROR_INVALID_DEVICE" : "CUDA_ERROR_STUB";
    return 0;
}
