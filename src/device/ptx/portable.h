// The PTX instructions of our kernels, one function each: those that sm_80 and all later chips have, and what sm_75 has
// in their place. No other folder holds asm. Names of instructions and operands: PTX ISA 9.0.
#pragma once
#include "rules/dtype.h"
#include "rules/spec.h"

#define TESSERA_DEVICE __device__ __forceinline__

namespace tessera::device {

using rules::Index;
using rules::Word;
using Address = unsigned;  // in shared memory

constexpr float infinity = rules::infinity<float>, minus_infinity = -infinity;
constexpr float log2_e = 1.4426950408889634f, ln_2 = 0.6931471805599453f;
#if __CUDA_ARCH__ / 10 == 90
inline constexpr bool is_sm90 = true;
#else
inline constexpr bool is_sm90 = false;
#endif

TESSERA_DEVICE Address shared_address(const void* pointer) {
  return static_cast<Address>(__cvta_generic_to_shared(pointer));
}

// The same address, of which the compiler knows no more: what is derived from it is computed here and not kept in
// registers from before a loop.
TESSERA_DEVICE Address anew(Address address) {
  asm volatile("" : "+r"(address));
  return address;
}

// What memory held is read again after this.
TESSERA_DEVICE void forget() {
  asm volatile("" ::: "memory");
}

// An array that is to lie in memory (local), and is read again after this.
template <class T>
TESSERA_DEVICE void keep_in_memory(T& x) {
  asm volatile("" ::"l"(&x) : "memory");
}

// This thread's index, read from the chip again each time, so that it takes no register for long.
TESSERA_DEVICE int thread_index() {
  int index;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(index));
  return index;
}

struct Chunk {  // 16 bytes
  Word word[4];
};
TESSERA_DEVICE Chunk load_chunk(Address from) {
  Chunk c;
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(c.word[0]), "=r"(c.word[1]), "=r"(c.word[2]), "=r"(c.word[3])
               : "r"(from)
               : "memory");
  return c;
}
TESSERA_DEVICE Chunk load_chunk(const void* from) {  // from global memory
  Chunk c;
  asm volatile("ld.global.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(c.word[0]), "=r"(c.word[1]), "=r"(c.word[2]), "=r"(c.word[3])
               : "l"(from)
               : "memory");
  return c;
}
TESSERA_DEVICE void store_chunk(Address to, const Chunk& c) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(c.word[0]), "r"(c.word[1]), "r"(c.word[2]),
               "r"(c.word[3])
               : "memory");
}
TESSERA_DEVICE void store_chunk(void* to, const Chunk& c) {  // to global memory
  asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(c.word[0]), "r"(c.word[1]), "r"(c.word[2]),
               "r"(c.word[3])
               : "memory");
}
TESSERA_DEVICE void store_two(float* to, float x, float y) {  // at a multiple of 8 bytes
  asm volatile("st.global.v2.f32 [%0], {%1, %2};" ::"l"(to), "f"(x), "f"(y) : "memory");
}
TESSERA_DEVICE void store_two(unsigned short* to, Word x, Word y) {  // four numbers of 16 bits
  asm volatile("st.global.v2.b32 [%0], {%1, %2};" ::"l"(to), "r"(x), "r"(y) : "memory");
}
TESSERA_DEVICE void store_two(Address to, float x, float y) {
  asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(to), "f"(x), "f"(y) : "memory");
}
TESSERA_DEVICE Word load_word(Address from) {
  Word x;
  asm volatile("ld.shared.b32 %0, [%1];" : "=r"(x) : "r"(from) : "memory");
  return x;
}
TESSERA_DEVICE void store_word(Address to, Word x) {
  asm volatile("st.shared.b32 [%0], %1;" ::"r"(to), "r"(x) : "memory");
}
TESSERA_DEVICE unsigned short load_half(Address from) {
  unsigned short x;
  asm volatile("ld.shared.b16 %0, [%1];" : "=h"(x) : "r"(from) : "memory");
  return x;
}
TESSERA_DEVICE void store_half(Address to, unsigned short x) {
  asm volatile("st.shared.b16 [%0], %1;" ::"r"(to), "h"(x) : "memory");
}

// Copies 16 bytes to shared memory in the background; if not `there`, 16 zeros, and nothing is read. sm_75 copies at
// once.
TESSERA_DEVICE void copy_16(Address to, const void* from, bool there) {
#if __CUDA_ARCH__ >= 800
  const int bytes = there ? 16 : 0;
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
#else
  store_chunk(to, there ? load_chunk(from) : Chunk{});
#endif
}
TESSERA_DEVICE void copy_4(Address to, const void* from, bool there) {  // the same of 4 bytes; from sm_80 on
  const int bytes = there ? 4 : 0;
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
}
TESSERA_DEVICE void close_copies() {  // those since the last call are one group
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}
template <int groups>
TESSERA_DEVICE void wait_copies() {  // of this thread, until at most so many groups are under way
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.wait_group %0;" ::"n"(groups) : "memory");
#endif
}

// In global memory; from sm_70 on.
TESSERA_DEVICE unsigned long long load_acquire(const unsigned long long* from) {
  unsigned long long x;
  asm volatile("ld.acquire.gpu.global.u64 %0, [%1];" : "=l"(x) : "l"(from) : "memory");
  return x;
}
TESSERA_DEVICE void store_release(unsigned long long* to, unsigned long long x) {
  asm volatile("st.release.gpu.global.u64 [%0], %1;" ::"l"(to), "l"(x) : "memory");
}

// Four 8 x 8 matrices of 16-bit numbers: lane l names the row of 16 bytes that is row l % 8 of matrix l / 8. Each lane
// receives two neighbours of each: of row lane / 4, or transposed of column lane / 4.
TESSERA_DEVICE void load_matrices(Word (&m)[4], Address row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3])
               : "r"(row)
               : "memory");
}
TESSERA_DEVICE void load_transposed(Word (&m)[4], Address row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3])
               : "r"(row)
               : "memory");
}

// c (16 x 8) += a (16 x 16) b (16 x 8). Lane l holds of c rows l / 4 and l / 4 + 8, columns 2 (l % 4) and the next.
template <rules::Float>
struct Number;
template <>
struct Number<rules::Float::bf16> {  // from sm_80 on
  static TESSERA_DEVICE void multiply_add(float (&c)[4], const Word (&a)[4], Word b0, Word b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  }
  static TESSERA_DEVICE Word pack(float low, float high) {
#if __CUDA_ARCH__ >= 800
    Word both;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
    return both;
#else
    return rules::float_to_bf16(low) | static_cast<Word>(rules::float_to_bf16(high)) << 16;
#endif
  }
  static TESSERA_DEVICE float unpack(Word low) {
    return rules::bf16_to_float(static_cast<rules::Half>(low));
  }
};
template <>
struct Number<rules::Float::f16> {
  static TESSERA_DEVICE void multiply_add(float (&c)[4], const Word (&a)[4], Word b0, Word b1) {
#if __CUDA_ARCH__ >= 800
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#else
    multiply_add_8(c, a[0], a[1], b0);
    multiply_add_8(c, a[2], a[3], b1);
#endif
  }
  static TESSERA_DEVICE Word pack(float low, float high) {
#if __CUDA_ARCH__ >= 800
    Word both;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
    return both;
#else
    unsigned short a, b;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(a) : "f"(low));
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(b) : "f"(high));
    return a | static_cast<Word>(b) << 16;
#endif
  }
  static TESSERA_DEVICE float unpack(Word low) {
    float x;
    asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(static_cast<unsigned short>(low)));
    return x;
  }

 private:
  static TESSERA_DEVICE void multiply_add_8(float (&c)[4], Word a0, Word a1, Word b) {  // a is 16 x 8
    asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a0), "r"(a1), "r"(b));
  }
};

// c (16 x 8) += a (16 x 8) b (8 x 8), of float32 whose fractions were rounded to TF32's. From sm_80 on. Lane l holds of
// a rows l / 4 and l / 4 + 8 of column l % 4, then of column l % 4 + 4; of b the same columns as rows, column l / 4.
TESSERA_DEVICE Word to_tf32(float x) {
  Word bits;
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(bits) : "f"(x));
  return bits;
}
TESSERA_DEVICE void multiply_add_tf32(float (&c)[4], const Word (&a)[4], Word b0, Word b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Adds to four numbers of global memory, in any order with others.
TESSERA_DEVICE void add_to_4(float* to, const float (&x)[4]) {
#if __CUDA_ARCH__ >= 900
  asm volatile("red.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to), "f"(x[0]), "f"(x[1]), "f"(x[2]), "f"(x[3])
               : "memory");
#else
  for (int i = 0; i < 4; ++i) asm volatile("red.global.add.f32 [%0], %1;" ::"l"(to + i), "f"(x[i]) : "memory");
#endif
}

TESSERA_DEVICE float exp2_fast(float x) {  // relative error 2^-22; 0 of -inf
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
TESSERA_DEVICE float from_lane(float x, int mask) {  // of lane ^ mask
  return __shfl_xor_sync(0xFFFFFFFFu, x, mask);
}
TESSERA_DEVICE float of_lane(float x, int lane) {
  return __shfl_sync(0xFFFFFFFFu, x, lane);
}

// What is the same in all lanes of a warp, told to the compiler: what follows from it needs no vector registers.
TESSERA_DEVICE int uniform(int x) {
  return __shfl_sync(0xFFFFFFFFu, x, 0);
}
// Four lanes hold a row's numbers in turns, word d of each of four chunks at lane d; after this each holds a chunk.
TESSERA_DEVICE void transpose_4(Word (&x)[4]) {
  const int lane = thread_index();
#pragma unroll
  for (int d = 2; d > 0; d /= 2) {
    const bool upper = lane & d;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (i & d) continue;
      const Word got = __shfl_xor_sync(0xFFFFFFFFu, upper ? x[i] : x[i + d], d);
      (upper ? x[i] : x[i + d]) = got;
    }
  }
}

}  // namespace tessera::device
