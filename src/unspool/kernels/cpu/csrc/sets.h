/* The instruction sets that the library was built for, and which of them this machine has. Included by library.c. */
#ifndef UNSPOOL_SETS_H
#define UNSPOOL_SETS_H

#include <stddef.h>

#include "internal.h"

#if defined(__linux__) && defined(__aarch64__)
#include <sys/auxv.h>
#elif defined(__APPLE__)
#include <sys/sysctl.h>
#elif defined(__x86_64__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#if defined(__aarch64__)
#if defined(__APPLE__)
static int has(const char *feature) {
    int value = 0;
    size_t size = sizeof value;
    return !sysctlbyname(feature, &value, &size, NULL, 0) && value;
}
static int has_dot(void) { return has("hw.optional.arm.FEAT_DotProd"); }
static int has_i8mm(void) { return has("hw.optional.arm.FEAT_I8MM"); }
#elif defined(__linux__)
static int has_dot(void) { return (getauxval(16) >> 20) & 1; } /* AT_HWCAP, ASIMDDP */
static int has_i8mm(void) { return has_dot() && ((getauxval(26) >> 13) & 1); } /* AT_HWCAP2, I8MM */
#else
static int has_dot(void) { return 0; }
static int has_i8mm(void) { return 0; }
#endif
#elif defined(__x86_64__)
static uint64_t saved_registers(void) { /* what the system keeps when it switches threads */
    uint32_t low, high;
    __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return ((uint64_t)high << 32) | low;
}
static int has_avx2(void) {
    uint32_t a, b, c, d;
    if (!__get_cpuid(1, &a, &b, &c, &d)) return 0;
    if ((c & (1u << 12 | 1u << 27 | 1u << 28 | 1u << 29)) != (1u << 12 | 1u << 27 | 1u << 28 | 1u << 29)) return 0;
    if ((saved_registers() & 6) != 6) return 0;
    return __get_cpuid_count(7, 0, &a, &b, &c, &d) && (b >> 5 & 1);
}
static int has_avx512(void) {
    uint32_t a, b, c, d;
    if (!has_avx2() || (saved_registers() & 0xe6) != 0xe6) return 0;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return 0;
    return (b >> 16 & 1) && (b >> 17 & 1) && (b >> 30 & 1) && (b >> 31 & 1) && (c >> 11 & 1); /* F, DQ, BW, VL, VNNI */
}
/* The matrix unit: a process asks the system for its registers. */
#if !defined(US_NO_AMX)
static int has_amx(void) {
    uint32_t a, b, c, d;
    if (!has_avx512() || (saved_registers() >> 17 & 3) != 3) return 0;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || !(d >> 22 & 1) || !(d >> 24 & 1)) return 0; /* BF16, TILE */
#if defined(__linux__)
    return !syscall(SYS_arch_prctl, 0x1023, 18); /* ARCH_REQ_XCOMP_PERM, XTILEDATA */
#else
    return 0;
#endif
}
#endif
#endif

static int always(void) { return 1; }

static const struct {
    const us_kernels *kernels;
    int (*is_there)(void);
} sets[] = { /* best first */
#if defined(__aarch64__)
    {&us_neon_i8mm, has_i8mm},
    {&us_neon_dot, has_dot},
#elif defined(__x86_64__)
#if !defined(US_NO_AMX)
    {&us_amx, has_amx},
#endif
    {&us_avx512, has_avx512},
    {&us_avx2, has_avx2},
#endif
    {&us_plain, always},
};
#define NUM_SETS (sizeof sets / sizeof sets[0])

static const us_kernels *chosen;

static const us_kernels *kernels(void) {
    for (size_t i = 0; !chosen; i++)
        if (sets[i].is_there()) chosen = sets[i].kernels;
    return chosen;
}

#endif
