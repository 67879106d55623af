// Runs a kernel of `src/device/cast.cu` on the host: KERNEL FROM_WIDTH TO_WIDTH SHIFT FILE, result on stdout.
//
// Compile with -DKERNELS='K(name) K(name) ...'. SHIFT is how far the source is from alignment.

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define FUNCTION static inline
#define ENTRY static

struct dimension {
    unsigned x;
};

static struct dimension gridDim = {3}, blockDim = {32}, blockIdx, threadIdx;

static unsigned __float_as_uint(float value)
{
    unsigned bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

static float __uint_as_float(unsigned bits)
{
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static double __longlong_as_double(long long bits)
{
    double value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

#include "../../src/device/cast.cu"

static void fail(const char *what)
{
    fprintf(stderr, "%s\n", what);
    exit(1);
}

int main(int count, char **arguments)
{
    enum { GUARD = 64 };
    void (*kernel)(const void *, void *, u64) = NULL;
    size_t from_width, to_width, shift, length, room, at;
    unsigned char *from, *to;
    FILE *file;

    if (count != 6) {
        fail("KERNEL FROM_WIDTH TO_WIDTH SHIFT FILE");
    }
#define K(name)                             \
    if (strcmp(arguments[1], #name) == 0) { \
        kernel = name;                      \
    }
    KERNELS
    from_width = strtoul(arguments[2], NULL, 10);
    to_width = strtoul(arguments[3], NULL, 10);
    shift = strtoul(arguments[4], NULL, 10);
    file = fopen(arguments[5], "rb");
    if (!kernel || !file || fseek(file, 0, SEEK_END)) {
        fail("no such kernel or file");
    }
    length = (size_t)ftell(file);
    rewind(file);
    room = length / from_width * to_width;
    from = malloc(length + shift);
    to = malloc(room + GUARD);
    if (!from || !to || fread(from + shift, 1, length, file) != length) {
        fail("no memory, or a short read");
    }
    memset(to, 0xAA, room + GUARD);

    for (blockIdx.x = 0; blockIdx.x < gridDim.x; blockIdx.x++) {
        for (threadIdx.x = 0; threadIdx.x < blockDim.x; threadIdx.x++) {
            kernel(from + shift, to, length / from_width);
        }
    }
    for (at = room; at < room + GUARD; at++) {
        if (to[at] != 0xAA) {
            fail("the kernel wrote past the end");
        }
    }
    return fwrite(to, 1, room, stdout) != room;
}
