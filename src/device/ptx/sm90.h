// The PTX instructions that only Hopper has (sm_90a): the copy engine, its barriers, products of warpgroups. Names of
// instructions and operands: PTX ISA 9.0.
#pragma once
#include "device/ptx/portable.h"

namespace tessera::device {

using Barrier = unsigned long long;  // an mbarrier
using Descriptor = unsigned long long;

// ------------------------------------------------------------------------------------------------------- barriers

// A phase ends when every arrival and every announced byte has come; a wait names the parity of the phase it waits for.
TESSERA_DEVICE void make_barrier(Address barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
TESSERA_DEVICE void show_barriers() {  // to the copy engine; other threads see them after a __syncthreads()
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
TESSERA_DEVICE void arrive(Address barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
TESSERA_DEVICE void arrive_expecting(Address barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
TESSERA_DEVICE void wait(Address barrier, unsigned parity) {
  Word done;
  do
    asm volatile("{.reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p;}"
                 : "=r"(done)
                 : "r"(barrier), "r"(parity)
                 : "memory");
  while (!done);
}

// Among some threads of a block: `threads` of them wait or only arrive.
TESSERA_DEVICE void meet(int name, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(name), "r"(threads) : "memory");
}
TESSERA_DEVICE void pass_by(int name, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(name), "r"(threads) : "memory");
}

// ------------------------------------------------------------------------------------------------------- clusters

// All blocks of a cluster, but for threads that have ended. What one wrote before, others read after.
TESSERA_DEVICE void meet_cluster() {
  __syncwarp();
  asm volatile("barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned;" ::: "memory");
}
// Where another block of the cluster has what lies at `address` in this one's shared memory.
TESSERA_DEVICE Address in_block(Address address, int block) {
  Address there;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(block));
  return there;
}
template <int n>
TESSERA_DEVICE void load_from_block(float (&x)[n], Address from) {  // at a multiple of 16 bytes
#pragma unroll
  for (int i = 0; i < n; i += 4)
    asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(x[i]), "=f"(x[i + 1]), "=f"(x[i + 2]), "=f"(x[i + 3])
                 : "r"(from + 4 * i)
                 : "memory");
}

// ------------------------------------------------------------------------------------------------ the copy engine

TESSERA_DEVICE void prefetch_map(const rules::TensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}
// One box from (column, row, head, plane) on; what lies outside of the tensor comes as zeros. Its bytes count at the
// barrier.
enum class Kept : unsigned long long { once = 0x12F0000000000000, often = 0x14F0000000000000 };  // in the L2 cache
TESSERA_DEVICE void copy_box(Address to, const rules::TensorMap* map, Address barrier, int column, int row, int head,
                             int plane, Kept kept) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint [%0], "
      "[%1, {%3, %4, %5, %6}], [%2], %7;" ::"r"(to),
      "l"(map), "r"(barrier), "r"(column), "r"(row), "r"(head), "r"(plane), "l"(static_cast<unsigned long long>(kept))
      : "memory");
}
// The same box comes to the L2 cache.
TESSERA_DEVICE void prefetch_box(const rules::TensorMap* map, int column, int row, int head, int plane) {
  asm volatile("cp.async.bulk.prefetch.tensor.4d.L2.global.tile [%0, {%1, %2, %3, %4}];" ::"l"(map), "r"(column),
               "r"(row), "r"(head), "r"(plane)
               : "memory");
}
// What this thread wrote to shared memory is seen by the copy engine and by products.
TESSERA_DEVICE void show_to_engines() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// True in one lane of a whole warp. (The compiler then knows that one thread goes on, which `lane == 0` does not tell
// it: operands of the copy engine would be gathered in a loop.)
TESSERA_DEVICE bool is_elected() {
  Word yes;
  asm volatile("{.reg .pred p; elect.sync _|p, -1; selp.u32 %0, 1, 0, p;}" : "=r"(yes));
  return yes;
}

// -------------------------------------------------------------------------------------------- registers of warpgroups

template <int registers>
TESSERA_DEVICE void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(registers));
}
template <int registers>
TESSERA_DEVICE void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(registers));
}

// -------------------------------------------------------------------------------------------------------- products

// An operand in shared memory: slabs of 64 16-bit numbers a row (128 bytes, swizzled by 128), 8 rows are 1024 bytes.
// `slab_bytes` is read only of operands whose rows are summed over. An address has 18 bits.
TESSERA_DEVICE Descriptor describe(Address at, int slab_bytes) {
  return Descriptor{(at & 0x3FFFF) >> 4} | Descriptor{static_cast<unsigned>(slab_bytes) >> 4} << 16 |
         Descriptor{1024 >> 4} << 32 | Descriptor{1} << 62;
}
TESSERA_DEVICE Descriptor further(Descriptor d, int bytes) {
  return d + static_cast<unsigned>(bytes >> 4);
}

TESSERA_DEVICE void begin_products() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
TESSERA_DEVICE void close_products() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
template <int groups>
TESSERA_DEVICE void wait_products() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(groups) : "memory");
}
// After a wait: no use of these registers moves above this line.
template <int n>
TESSERA_DEVICE void landed(float (&x)[n]) {
#pragma unroll
  for (int i = 0; i < n; ++i) asm volatile("" : "+f"(x[i])::"memory");
}
template <int n>
TESSERA_DEVICE void landed(Word (&x)[n]) {
#pragma unroll
  for (int i = 0; i < n; ++i) asm volatile("" : "+r"(x[i])::"memory");
}

// Of a warpgroup: c (64 x columns) = or += a (64 x 16) b (16 x columns). Warp w has rows 16 w on; lane l of it columns
// 8 n + 2 (l % 4) and the next of row l / 4 in c[4 n] and c[4 n + 1], of row l / 4 + 8 in c[4 n + 2] and c[4 n + 3].
//   set, add: a and b in shared memory, sums run along their rows
//   add_rows: a in registers (mma.sync's order); sums run over b's rows
template <rules::Float, int columns>
struct Products;

#define TESSERA_PLACES_1 "%0, %1, %2, %3, %4, %5, %6, %7"
#define TESSERA_PLACES_2 TESSERA_PLACES_1 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define TESSERA_PLACES_3 TESSERA_PLACES_2 ", %16, %17, %18, %19, %20, %21, %22, %23"
#define TESSERA_PLACES_4 TESSERA_PLACES_3 ", %24, %25, %26, %27, %28, %29, %30, %31"
#define TESSERA_PLACES_5 TESSERA_PLACES_4 ", %32, %33, %34, %35, %36, %37, %38, %39"
#define TESSERA_PLACES_6 TESSERA_PLACES_5 ", %40, %41, %42, %43, %44, %45, %46, %47"
#define TESSERA_PLACES_7 TESSERA_PLACES_6 ", %48, %49, %50, %51, %52, %53, %54, %55"
#define TESSERA_PLACES_8 TESSERA_PLACES_7 ", %56, %57, %58, %59, %60, %61, %62, %63"
#define TESSERA_PLACES_9 TESSERA_PLACES_8 ", %64, %65, %66, %67, %68, %69, %70, %71"
#define TESSERA_PLACES_10 TESSERA_PLACES_9 ", %72, %73, %74, %75, %76, %77, %78, %79"
#define TESSERA_PLACES_11 TESSERA_PLACES_10 ", %80, %81, %82, %83, %84, %85, %86, %87"
#define TESSERA_PLACES_12 TESSERA_PLACES_11 ", %88, %89, %90, %91, %92, %93, %94, %95"
#define TESSERA_PLACES_13 TESSERA_PLACES_12 ", %96, %97, %98, %99, %100, %101, %102, %103"
#define TESSERA_PLACES_14 TESSERA_PLACES_13 ", %104, %105, %106, %107, %108, %109, %110, %111"
#define TESSERA_PLACES_15 TESSERA_PLACES_14 ", %112, %113, %114, %115, %116, %117, %118, %119"
#define TESSERA_PLACES_16 TESSERA_PLACES_15 ", %120, %121, %122, %123, %124, %125, %126, %127"
#define TESSERA_EIGHT(kind, i)                                                                                        \
  kind(c[8 * i]), kind(c[8 * i + 1]), kind(c[8 * i + 2]), kind(c[8 * i + 3]), kind(c[8 * i + 4]), kind(c[8 * i + 5]), \
      kind(c[8 * i + 6]), kind(c[8 * i + 7])
#define TESSERA_SUMS_1(kind) TESSERA_EIGHT(kind, 0)
#define TESSERA_SUMS_2(kind) TESSERA_SUMS_1(kind), TESSERA_EIGHT(kind, 1)
#define TESSERA_SUMS_3(kind) TESSERA_SUMS_2(kind), TESSERA_EIGHT(kind, 2)
#define TESSERA_SUMS_4(kind) TESSERA_SUMS_3(kind), TESSERA_EIGHT(kind, 3)
#define TESSERA_SUMS_5(kind) TESSERA_SUMS_4(kind), TESSERA_EIGHT(kind, 4)
#define TESSERA_SUMS_6(kind) TESSERA_SUMS_5(kind), TESSERA_EIGHT(kind, 5)
#define TESSERA_SUMS_7(kind) TESSERA_SUMS_6(kind), TESSERA_EIGHT(kind, 6)
#define TESSERA_SUMS_8(kind) TESSERA_SUMS_7(kind), TESSERA_EIGHT(kind, 7)
#define TESSERA_SUMS_9(kind) TESSERA_SUMS_8(kind), TESSERA_EIGHT(kind, 8)
#define TESSERA_SUMS_10(kind) TESSERA_SUMS_9(kind), TESSERA_EIGHT(kind, 9)
#define TESSERA_SUMS_11(kind) TESSERA_SUMS_10(kind), TESSERA_EIGHT(kind, 10)
#define TESSERA_SUMS_12(kind) TESSERA_SUMS_11(kind), TESSERA_EIGHT(kind, 11)
#define TESSERA_SUMS_13(kind) TESSERA_SUMS_12(kind), TESSERA_EIGHT(kind, 12)
#define TESSERA_SUMS_14(kind) TESSERA_SUMS_13(kind), TESSERA_EIGHT(kind, 13)
#define TESSERA_SUMS_15(kind) TESSERA_SUMS_14(kind), TESSERA_EIGHT(kind, 14)
#define TESSERA_SUMS_16(kind) TESSERA_SUMS_15(kind), TESSERA_EIGHT(kind, 15)
// m: columns / 16; p0 .. p4: the numbers of the operands after the sums. Widths as rules::has_products says.
#define TESSERA_PRODUCTS(type, columns, m, p0, p1, p2, p3, p4)                                                       \
  template <>                                                                                                        \
  struct Products<rules::Float::type, columns> {                                                                     \
    using Sums = float[8 * m];                                                                                       \
    static TESSERA_DEVICE void set(Sums& c, Descriptor a, Descriptor b) {                                            \
      asm volatile("{.reg .pred p; setp.ne.b32 p, 0, 0; wgmma.mma_async.sync.aligned.m64n" #columns "k16.f32." #type \
                   "." #type " {" TESSERA_PLACES_##m "}, %" #p0 ", %" #p1 ", p, 1, 1, 0, 0;}"                        \
                   : TESSERA_SUMS_##m("=f")                                                                          \
                   : "l"(a), "l"(b)                                                                                  \
                   : "memory");                                                                                      \
    }                                                                                                                \
    static TESSERA_DEVICE void add(Sums& c, Descriptor a, Descriptor b) {                                            \
      asm volatile("{.reg .pred p; setp.eq.b32 p, 0, 0; wgmma.mma_async.sync.aligned.m64n" #columns "k16.f32." #type \
                   "." #type " {" TESSERA_PLACES_##m "}, %" #p0 ", %" #p1 ", p, 1, 1, 0, 0;}"                        \
                   : TESSERA_SUMS_##m("+f")                                                                          \
                   : "l"(a), "l"(b)                                                                                  \
                   : "memory");                                                                                      \
    }                                                                                                                \
    static TESSERA_DEVICE void add_rows(Sums& c, const Word* a, Descriptor b) {                                      \
      asm volatile("{.reg .pred p; setp.eq.b32 p, 0, 0; wgmma.mma_async.sync.aligned.m64n" #columns "k16.f32." #type \
                   "." #type " {" TESSERA_PLACES_##m "}, {%" #p0 ", %" #p1 ", %" #p2 ", %" #p3 "}, %" #p4            \
                                                     ", p, 1, 1, 1;}"                                                \
                   : TESSERA_SUMS_##m("+f")                                                                          \
                   : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b)                                              \
                   : "memory");                                                                                      \
    }                                                                                                                \
  };
#define TESSERA_BOTH(columns, m, p0, p1, p2, p3, p4)     \
  TESSERA_PRODUCTS(bf16, columns, m, p0, p1, p2, p3, p4) \
  TESSERA_PRODUCTS(f16, columns, m, p0, p1, p2, p3, p4)
TESSERA_BOTH(64, 4, 32, 33, 34, 35, 36)
TESSERA_BOTH(80, 5, 40, 41, 42, 43, 44)
TESSERA_BOTH(96, 6, 48, 49, 50, 51, 52)
TESSERA_BOTH(112, 7, 56, 57, 58, 59, 60)
TESSERA_BOTH(128, 8, 64, 65, 66, 67, 68)
TESSERA_BOTH(160, 10, 80, 81, 82, 83, 84)
TESSERA_BOTH(192, 12, 96, 97, 98, 99, 100)
TESSERA_BOTH(256, 16, 128, 129, 130, 131, 132)
#undef TESSERA_BOTH
#undef TESSERA_PRODUCTS

}  // namespace tessera::device
