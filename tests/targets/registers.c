/* check(n): n times, fills all vector registers that this processor has (and the tiles of AMX) with known values, lets some
 * time go by, and reads them again. The number of times that one was another. x86-64. */
#include <cpuid.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

static int have_avx512(void) {
    unsigned a, b, c, d, lo, hi;
    if (!__get_cpuid(1, &a, &b, &c, &d) || !(c & 1 << 27) || !__get_cpuid_count(7, 0, &a, &b, &c, &d) || !(b & 1 << 16))
        return 0;
    __asm__ volatile("xgetbv" : "=a"(lo), "=d"(hi) : "c"(0));
    return (lo & 0xe6) == 0xe6;
}

static int have_amx(void) {
    unsigned a, b, c, d;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || !(d & 1 << 24))
        return 0;
    return syscall(SYS_arch_prctl, 0x1023, 18) == 0; /* ARCH_REQ_XCOMP_PERM, XTILEDATA */
}

#define PAUSE "mov $300, %%ecx\n1: pause\n dec %%ecx\n jnz 1b\n"

static int sse(const char *in, char *out) {
    __asm__ volatile("movdqu (%0), %%xmm0\n movdqu 16(%0), %%xmm7\n movdqu 32(%0), %%xmm15\n" PAUSE
                     "movdqu %%xmm0, (%1)\n movdqu %%xmm7, 16(%1)\n movdqu %%xmm15, 32(%1)\n"
                     : : "r"(in), "r"(out) : "rcx", "xmm0", "xmm7", "xmm15", "memory", "cc");
    return memcmp(in, out, 48);
}

static int avx512(const char *in, char *out) {
    __asm__ volatile("vmovdqu64 (%0), %%zmm0\n vmovdqu64 64(%0), %%zmm9\n vmovdqu64 128(%0), %%zmm16\n"
                     "vmovdqu64 192(%0), %%zmm31\n kmovw (%0), %%k5\n" PAUSE
                     "vmovdqu64 %%zmm0, (%1)\n vmovdqu64 %%zmm9, 64(%1)\n vmovdqu64 %%zmm16, 128(%1)\n"
                     "vmovdqu64 %%zmm31, 192(%1)\n kmovw %%k5, 256(%1)\n vzeroupper\n"
                     : : "r"(in), "r"(out) : "rcx", "memory", "cc", "xmm0", "xmm9");
    return memcmp(in, out, 256) || memcmp(in, out + 256, 2);
}

static int amx(const char *in, char *out) {
    unsigned char config[64] = {1};
    for (int tile = 0; tile < 2; tile++) {
        config[16 + 2 * tile] = 64; /* bytes a row */
        config[48 + tile] = 16;     /* rows */
    }
    __asm__ volatile("ldtilecfg (%2)\n tileloadd (%0,%3,1), %%tmm0\n tileloadd (%0,%3,1), %%tmm1\n" PAUSE
                     "tilestored %%tmm1, (%1,%3,1)\n tilerelease\n"
                     : : "r"(in), "r"(out), "r"(config), "r"(64L) : "rcx", "memory", "cc");
    return memcmp(in, out, 1024);
}

long check(long n) {
    static int wide = -1, tiles;
    if (wide < 0) {
        tiles = have_amx();
        wide = have_avx512();
    }
    char in[1024], out[1024];
    long wrong = 0;
    for (long i = 0; i < n; i++) {
        for (int k = 0; k < 1024; k++)
            in[k] = (char)(i * 31 + k * 7);
        memset(out, 0, sizeof out);
        wrong += sse(in, out) != 0;
        if (wide)
            wrong += avx512(in, out) != 0;
        if (tiles)
            wrong += amx(in, out) != 0;
    }
    return wrong;
}
