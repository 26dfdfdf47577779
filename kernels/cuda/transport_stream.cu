// Problems whose costs, or exponents (transport_exponents.cu), lie in memory, in float32: an iteration, or the
// measuring of the end, reads them once (Hopper).
//
// A block has a slab of rows, which a ring of bulk copies brings to shared memory ahead of their use; a thread owns the
// same columns of every row. A row's densities T = 2^(z + row term + column term), at the potentials before, are made
// once: their sum gives the row's new potential, and weighted by that they are added to the thread's column sums at
// once. So nothing is read twice. The terms keep densities near the plan's; a row whose sum is still far from 1 is
// made again, from shared memory, under its maximum; a column whose sum is far from its mass is read again, in double.
//
// Terms: of row i (phi_i - base_i + r) s, of column j (phi_j - base_j - r) s + log2 b_j. base: the frame of exponents
// that are kept, for costs 0; r: the first column's initial potential, since potentials may share a large constant; for
// exponents, whose frame has it, 0. Every block reads all columns' terms: they are kept as floats.
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/transport_hopper.cuh"
#include "kernels/cuda/transport_launch.h"
#include "kernels/cuda/transport_rows.cuh"

namespace sinkhorn {
namespace cuda {
namespace {

constexpr int kGroupThreads = 256;  // Few: what they do once a row, all of them do.
constexpr int kQuadColumns = 4 * kGroupThreads;
constexpr int kStreamBytes = 205 * 1024;  // Of shared memory: rows on their way, and columns' terms.
// Rows that are short are divided among two groups of a block's threads, so that one adds up while the other makes
// densities. Of longer ones registers have room for one group, which makes the next densities before it adds up.
constexpr int kPairedColumns = 4096;

#if SINKHORN_HOPPER

// What registers have room for: rows whose densities a thread has at once, those of the next rows beside them, columns'
// terms.
constexpr int RowsAtOnce(int quads, int groups) { return quads <= (groups == 2 ? 2 : 6) ? 2 : 1; }
constexpr bool MakesAhead(int quads, int groups) { return groups == 1 && quads <= 12; }
// Quads that all threads have, of jobs that a kernel for so many serves.
constexpr int QuadsFull(int quads) { return quads - (quads <= 12 ? 2 : 4); }
constexpr bool HoldsTerms(int quads) { return quads <= 10; }
constexpr int TermBytes(int quads) {
  return HoldsTerms(quads) ? 0 : quads * kQuadColumns * static_cast<int>(sizeof(float));
}
constexpr int RingBytes(int quads, int groups) { return (kStreamBytes - TermBytes(quads)) / groups / 128 * 128; }
constexpr int kSlabRows = 64;  // That a group has the data of at once.
constexpr int kEndWarps = kThreads / 32, kEndParts = kThreads / kEndColumns;
static_assert(kEndColumns == 64, "a lane for two columns");
// Densities below 2^-126 are nothing. Rows whose sums are within this range are weighted by 2^40 of their mass at most,
// so a column lacks 2^-86 of all rows' mass: one whose sum is not less than 2^-60 of it has all its digits.
constexpr float kMostWeight = 0x1p+40f, kLeastShare = 0x1p-60f;
constexpr int kMostStages = 16;

__device__ inline bool IsSafe(float row_sum) { return row_sum > 1 / kMostWeight && row_sum < kMostWeight; }

// A member's numbers and the frame that they are in.
struct StreamView {
  const double* base[2];  // Null: 0.
  const double *phi[2], *log_mass[2];
  double reference, scale;
  float factor;  // From numbers to exponents.
  __device__ double Base(int side, int i) const { return base[side] != nullptr ? base[side][i] : 0; }
  __device__ double ColumnTerm(double phi, int j) const { return (phi - Base(1, j) - reference) * scale; }
};
__device__ inline StreamView StreamViewOf(const Member& member, const EngineState& state) {
  const Job& job = member.job;
  StreamView view;
  view.scale = kLog2E / state.epsilon;
  view.factor = job.dense ? static_cast<float>(-view.scale) : 1;
  for (int side = 0; side < 2; ++side) {
    view.base[side] = job.dense ? nullptr : member.At<double>(job.at.frame[side]);
    view.phi[side] = member.phi(0, state.parity, side);
    view.log_mass[side] = member.log_mass(side);
  }
  view.reference = *member.At<double>(job.at.stream_reference);
  return view;
}
template <typename T>
__device__ inline const T* NumbersOf(const Member& member) {
  const Job& job = member.job;
  if (!job.dense) return member.At<T>(job.at.exponents);
  const int64_t first = job.in.cost.shared ? 0 : member.index * job.size[0] * job.size[1];
  return static_cast<const T*>(job.in.cost.data) + first;
}

__device__ inline void LoadQuad(const float* row, int quad, float (&z)[4]) {
  const float4 four = reinterpret_cast<const float4*>(row)[quad];
  z[0] = four.x, z[1] = four.y, z[2] = four.z, z[3] = four.w;
}
__device__ inline void LoadQuad(const __half* row, int quad, float (&z)[4]) {
  const uint2 four = reinterpret_cast<const uint2*>(row)[quad];
  const float2 low = __half22float2(reinterpret_cast<const __half2&>(four.x));
  const float2 high = __half22float2(reinterpret_cast<const __half2&>(four.y));
  z[0] = low.x, z[1] = low.y, z[2] = high.x, z[3] = high.y;
}
__device__ inline float LoadNumber(const float* at) { return __ldg(at); }
__device__ inline float LoadNumber(const __half* at) { return __half2float(__ldg(at)); }

template <typename Combine>
__device__ inline float CombineOverWarp(float value, int lanes, Combine combine) {
#pragma unroll
  for (int lane = lanes / 2; lane > 0; lane /= 2) value = combine(value, __shfl_xor_sync(0xffffffffu, value, lane));
  return value;
}
__device__ inline float Sum(float a, float b) { return a + b; }
__device__ inline float Larger(float a, float b) { return fmaxf(a, b); }
// One of a block's groups of threads.
struct Group {
  static constexpr int kWarps = kGroupThreads / 32;
  __device__ static int Index() { return threadIdx.x / kGroupThreads; }
  __device__ static int Thread() { return threadIdx.x % kGroupThreads; }
  __device__ static int Warp() { return Thread() / 32; }
  __device__ static void Wait() { WaitAt(1 + Index(), kGroupThreads); }
  // Of one value of each thread, in every thread. `parts`: a float for each warp.
  template <typename Combine>
  __device__ static float CombineAll(float value, float* parts, Combine combine) {
    value = CombineOverWarp(value, 32, combine);
    Wait();  // What is there has been read.
    if (threadIdx.x % 32 == 0) parts[Warp()] = value;
    Wait();
    return CombineOverWarp(parts[threadIdx.x % kWarps], kWarps, combine);
  }
};

// What a row's densities are made of and weighted by.
struct SlabRow {
  float term, mass;
  float rounding;  // What the term, as a float, lacks.
  float pull;      // (damping - 1) (phi + shift) s
};
// How rows move; the same for all of a pass.
struct RowRule {
  bool plain;  // To the marginal.
  bool measuring;
  float relax, damping;
  // What densities, `sum` of which times 2^level are the row's, are weighted by: its mass, at its new potential.
  __device__ float Weight(const SlabRow& row, float sum, float level) const {
    if (plain) return row.mass * FastReciprocal(sum);
    const float lse = log2f(sum) + level + row.rounding;
    const float move = measuring ? 0 : relax * (row.pull - damping * lse);
    const float weight = FastExp2(row.rounding + move + level);
    if (weight < kMostWeight) return row.mass * weight;
    return row.mass > 0 ? INFINITY : 0;  // All columns are read again.
  }
};
__device__ inline RowRule RowRuleOf(const Member& member, const EngineState& state, Pass pass) {
  const double rho = member.job.solver.rho_a;
  const bool measuring = pass == Pass::kMeasure;
  return {!measuring && state.relax == 1 && isinf(rho), measuring, static_cast<float>(state.relax),
          isinf(rho) ? 1.0f : static_cast<float>(1 / (1 + state.epsilon / rho))};
}

// The rows that a group has at once.
struct SlabMemory {
  alignas(16) SlabRow rows[kSlabRows];
  RowStep steps[kSlabRows];
  ScaledSum sums[kSlabRows];
};

// The ring of rows on their way through shared memory, some to a stage: a thread takes hundreds of cycles to begin a
// copy, and all others of its group wait for it at the next row.
template <typename T>
class RowRing {
 public:
  // What is left to copy: of one thread alone, in shared memory.
  struct Copies {
    const T* next;
    int left;
  };
  // In so much of dynamic shared memory, from `base` on.
  __device__ RowRing(const Job& job, char* base, int ring_bytes, uint64_t* full, Copies* copies)
      : base_(reinterpret_cast<T*>(base)), full_(full), copies_(copies), columns_(StreamColumns(job)) {
    constexpr int kStagesWanted = 3, kStageRowsMost = 8;
    const int rows = ring_bytes / (columns_ * static_cast<int>(sizeof(T)));
    stage_rows_ = max(1, min(rows / kStagesWanted, kStageRowsMost));
    stages_ = min(rows / stage_rows_, kMostStages);
  }
  // By one thread: the first copies.
  __device__ void Begin(const T* first, int rows) const {
    for (int stage = 0; stage < stages_; ++stage) InitBarrier(&full_[stage], 1);
    FenceBarriers();
    *copies_ = {first, rows};
    for (int stage = 0; stage < stages_; ++stage) Copy(stage);
  }
  // The next row, by its place in the ring.
  __device__ int Await() {
    if (read_ == 0) WaitForPhase(&full_[stage_], phase_);
    const int place = stage_ * stage_rows_ + read_;
    if (++read_ == stage_rows_) {
      read_ = 0;
      if (++stage_ == stages_) stage_ = 0, phase_ ^= 1;
    }
    return place;
  }
  __device__ const T* At(int place) const { return base_ + place * columns_; }
  // By the thread that began them, when all have read a row. Rows are released in order.
  __device__ void Release(int place) const {
    if ((place + 1) % stage_rows_ == 0) Copy(place / stage_rows_);
  }
  // By the same thread, before the block leaves without having read any.
  __device__ void Abandon(int rows) const {
    for (int stage = 0; stage < stages_ && stage * stage_rows_ < rows; ++stage) WaitForPhase(&full_[stage], 0);
  }

 private:
  __device__ void Copy(int stage) const {
    const int rows = min(copies_->left, stage_rows_);
    if (rows == 0) return;
    const unsigned bytes = rows * columns_ * static_cast<int>(sizeof(T));
    ArriveExpecting(&full_[stage], bytes);
    CopyBulk(SharedAddress(At(stage * stage_rows_)), copies_->next, bytes, &full_[stage]);
    copies_->next += rows * columns_;
    copies_->left -= rows;
  }

  T* const base_;
  uint64_t* const full_;
  Copies* const copies_;
  const int columns_;
  int stages_, stage_rows_;
  int stage_ = 0, phase_ = 0, read_ = 0;  // Of the next row; rows of that stage that were awaited.
};

// A thread's columns.
template <int kQuads, int kGroups, typename T>
struct StreamColumnsOf {
  static constexpr bool kHolds = HoldsTerms(kQuads);
  float held[kHolds ? kQuads : 1][4], sums[kQuads][4];
  int columns, quads;
  float factor;  // Of rows' numbers; known later.

  // `all`: of all columns.
  __device__ StreamColumnsOf(const float* all, int count) : columns(count), quads(count / 4), factor(1) {
    constexpr float kNothing = static_cast<float>(kVoid);
#pragma unroll
    for (int q = 0; q < kQuads; ++q) {
      float terms[4] = {kNothing, kNothing, kNothing, kNothing};
      if (4 * Quad(q) < columns) LoadQuad(all, Quad(q), terms);
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        if constexpr (kHolds) held[q][k] = terms[k];
        sums[q][k] = 0;
      }
      if constexpr (!kHolds) Shared()[Quad(q)] = make_float4(terms[0], terms[1], terms[2], terms[3]);
    }
  }
  __device__ static int Quad(int q) { return Group::Thread() + kGroupThreads * q; }
  // Terms of all columns, behind the ring.
  __device__ static float4* Shared() {
    return reinterpret_cast<float4*>(DynamicShared() + kStreamBytes - TermBytes(kQuads));
  }
  // The exponents of a row, seen from its level.
  __device__ void Load(const T* row, float term, float (&e)[kQuads][4]) const {
#pragma unroll
    for (int q = 0; q < kQuads; ++q) {
      float z[4], terms[4];
      // Terms of columns that are not there make densities nothing.
      LoadQuad(row, q < QuadsFull(kQuads) ? Quad(q) : min(Quad(q), quads - 1), z);
      if constexpr (kHolds) {
        for (int k = 0; k < 4; ++k) terms[k] = held[q][k];
      } else {
        LoadQuad(reinterpret_cast<const float*>(Shared()), Quad(q), terms);
      }
#pragma unroll
      for (int k = 0; k < 4; ++k) e[q][k] = fmaf(z[k], factor, terms[k]) + term;
    }
  }
  __device__ static float Densities(float (&e)[kQuads][4]) {
    float sum = 0;
#pragma unroll
    for (int q = 0; q < kQuads; ++q) {
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        e[q][k] = FastExp2(e[q][k]);  // Infinite: the sum is not safe.
        sum += e[q][k];
      }
    }
    return sum;
  }
  __device__ void Add(const float (&t)[kQuads][4], float weight) {
#pragma unroll
    for (int q = 0; q < kQuads; ++q) {
#pragma unroll
      for (int k = 0; k < 4; ++k) sums[q][k] = fmaf(t[q][k], weight, sums[q][k]);
    }
  }
  // The block's sums. Those of two groups meet where rows were.
  __device__ void Store(float* out) {
    float4* shared = reinterpret_cast<float4*>(DynamicShared());
    if constexpr (kGroups == 2) {
      __syncthreads();  // All rows have been read.
      if (Group::Index() == 1) StoreOwn(shared);
      __syncthreads();
      if (Group::Index() == 1) return;
#pragma unroll
      for (int q = 0; q < kQuads; ++q) {
        if (Quad(q) >= quads) continue;
        const float4 other = shared[Quad(q)];
        sums[q][0] += other.x, sums[q][1] += other.y, sums[q][2] += other.z, sums[q][3] += other.w;
      }
    }
    StoreOwn(reinterpret_cast<float4*>(out));
  }

 private:
  __device__ void StoreOwn(float4* out) const {
#pragma unroll
    for (int q = 0; q < kQuads; ++q) {
      if (Quad(q) < quads) out[Quad(q)] = make_float4(sums[q][0], sums[q][1], sums[q][2], sums[q][3]);
    }
  }
};

// kRows rows at a time of a group, whose densities are this thread's of its columns.
template <int kQuads, int kGroups, int kRows, typename T>
class SlabSums {
 public:
  struct Densities {
    float t[kRows][kQuads][4], sum[kRows];
    int place[kRows];  // Of the row.
  };
  __device__ SlabSums(SlabMemory* memory, const RowRule& rule, RowRing<T>* ring,
                      StreamColumnsOf<kQuads, kGroups, T>* columns)
      : memory_(memory), rule_(rule), ring_(ring), columns_(columns) {}

  // Of rows from `row` on, `rows` there are. A row that is not there repeats the last.
  __device__ void Make(int row, int rows, Densities* made) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) made->place[r] = r == 0 || row + r < rows ? ring_->Await() : made->place[0];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      columns_->Load(ring_->At(made->place[r]), memory_->rows[min(row + r, rows - 1)].term, made->t[r]);
    }
#pragma unroll
    for (int r = 0; r < kRows; ++r) made->sum[r] = columns_->Densities(made->t[r]);
  }
  // The warp's part of their sums; Total when all warps' are there.
  __device__ void Tell(const Densities& made, float (*parts)[kRows]) const {
    float sum[kRows];
#pragma unroll
    for (int r = 0; r < kRows; ++r) sum[r] = CombineOverWarp(made.sum[r], 32, Sum);
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      if (threadIdx.x % 32 == r) parts[Group::Warp()][r] = sum[r];
    }
  }
  // What the rows are weighted by; others may take their places.
  __device__ void Weigh(int row, int rows, const float (*parts)[kRows], float* scratch, Densities* made,
                        float (&weight)[kRows]) {
    float sum[kRows], level[kRows];
#pragma unroll
    for (int r = 0; r < kRows; ++r) sum[r] = parts[threadIdx.x % Group::kWarps][r], level[r] = 0;
#pragma unroll
    for (int r = 0; r < kRows; ++r) sum[r] = CombineOverWarp(sum[r], Group::kWarps, Sum);
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      if (row + r < rows && !IsSafe(sum[r])) MakeAgain(row + r, r, scratch, made, &sum[r], &level[r]);
    }
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const bool there = row + r < rows;
      weight[r] = there ? rule_.Weight(memory_->rows[row + r], sum[r], level[r]) : 0;
      if (there && Group::Thread() == 0) {
        memory_->sums[row + r] = {level[r], sum[r]};
        ring_->Release(made->place[r]);
      }
    }
  }
  __device__ void Add(const Densities& made, const float (&weight)[kRows]) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) columns_->Add(made.t[r], weight[r]);
  }

 private:
  // A row under its maximum.
  __device__ void MakeAgain(int row, int r, float* scratch, Densities* made, float* sum, float* level) {
    const T* at = ring_->At(made->place[r]);
    const float term = memory_->rows[row].term;
    columns_->Load(at, term, made->t[r]);
    float most = static_cast<float>(kVoid);
#pragma unroll
    for (int q = 0; q < kQuads; ++q) {
#pragma unroll
      for (int k = 0; k < 4; ++k) most = fmaxf(most, made->t[r][q][k]);
    }
    most = Group::CombineAll(most, scratch, Larger);
    columns_->Load(at, term - most, made->t[r]);
    *sum = Group::CombineAll(columns_->Densities(made->t[r]), scratch, Sum);
    *level = most;
  }

  SlabMemory* const memory_;
  const RowRule& rule_;
  RowRing<T>* const ring_;
  StreamColumnsOf<kQuads, kGroups, T>* const columns_;
};

// `rows` rows, whose data are in memory. A group's sums meet while the next densities are made: by itself where it
// makes ahead, else by the other group.
template <int kQuads, int kGroups, typename T>
__device__ void SumRows(RowRing<T>* ring, int rows, const RowRule& rule, SlabMemory* memory,
                        StreamColumnsOf<kQuads, kGroups, T>* columns) {
  constexpr int kRows = RowsAtOnce(kQuads, kGroups);
  constexpr bool kAhead = MakesAhead(kQuads, kGroups);
  using Sums = SlabSums<kQuads, kGroups, kRows, T>;
  using Densities = typename Sums::Densities;
  __shared__ float all_parts[kGroups][2][Group::kWarps][kRows], all_scratch[kGroups][Group::kWarps];
  auto& parts = all_parts[Group::Index()];
  float* const scratch = all_scratch[Group::Index()];
  Sums sums(memory, rule, ring, columns);
  Densities even, odd;
  sums.Make(0, rows, &even);
  sums.Tell(even, parts[0]);
  const auto step = [&](int row, int turn, Densities* made, Densities* next) {
    float weight[kRows];
    Group::Wait();  // All have read the rows, and their sums' parts are there.
    sums.Weigh(row, rows, parts[turn], scratch, made, weight);
    const bool goes_on = row + kRows < rows;
    if (kAhead && goes_on) sums.Make(row + kRows, rows, next);
    sums.Add(*made, weight);
    if (!kAhead && goes_on) sums.Make(row + kRows, rows, next);
    if (goes_on) sums.Tell(*next, parts[turn ^ 1]);
  };
  for (int row = 0; row < rows; row += 2 * kRows) {
    step(row, 0, &even, kAhead ? &odd : &even);
    if (row + kRows < rows) step(row + kRows, 1, kAhead ? &odd : &even, &even);
  }
}

__device__ inline BlockStats NoStats() { return {0, 0, 0, 0, 0, 1}; }

// What a row's data are made of, of both parities: read before the state is known.
struct RowSource {
  double phi[2], base, mass, shift;
};
__device__ inline RowSource LoadRowSource(const Member& member, int i) {
  const Job& job = member.job;
  const double* base = job.dense ? nullptr : member.At<double>(job.at.frame[0]);
  return {{member.phi(0, 0, 0)[i], member.phi(0, 1, 0)[i]},
          base != nullptr ? base[i] : 0,
          member.mass(0)[i],
          member.Shift(0, 0, i)};
}
__device__ inline void StoreRow(const StreamView& view, const EngineState& state, const RowSource& source, int k,
                                double damping, SlabMemory* memory) {
  const RowStep step = {state.parity == 0 ? source.phi[0] : source.phi[1],
                        source.shift,
                        source.mass,
                        state.epsilon,
                        state.relax,
                        state.parity};
  const double term = (step.phi - source.base + view.reference) * view.scale;
  SlabRow row;
  row.term = static_cast<float>(term);
  row.rounding = static_cast<float>(term - row.term);
  row.mass = static_cast<float>(step.mass);
  row.pull = damping == 1 ? 0 : static_cast<float>((damping - 1) * (step.phi + step.shift) * view.scale);
  memory->rows[k] = row;
  memory->steps[k] = step;
}

#endif

// Where streaming begins, or goes on with columns' potentials that it has not made: their terms.
__global__ void __launch_bounds__(kThreads) StreamTermsKernel(LaunchTable table) {
#if SINKHORN_HOPPER
  AllowNextKernel();
  const BlockWork work = FindWork(table, blockIdx.x);
  const Job& job = CopyJob(table.jobs[work.job]);
  const int64_t blocks = CeilDiv(StreamColumns(job), kThreads);
  const Member member{job, work.block / blocks};
  const EngineState& state = *member.state(0);
  if (!IsStreamed(job, state)) return;
  const StreamView view = StreamViewOf(member, state);
  const int j = static_cast<int>(work.block % blocks) * kThreads + threadIdx.x;
  if (j >= StreamColumns(job)) return;
  const double term = j < job.size[1] ? view.ColumnTerm(view.phi[1][j], j) + view.log_mass[1][j] : kVoid;
  member.At<float>(job.at.stream_terms)[j] = static_cast<float>(term);
#endif
}

template <int kQuads, int kGroups, typename T>
__global__ void __launch_bounds__(kGroups* kGroupThreads, 1) StreamKernel(LaunchTable table, Pass pass) {
#if SINKHORN_HOPPER
  __shared__ alignas(8) uint64_t full[kGroups][kMostStages];
  __shared__ typename RowRing<T>::Copies copies[kGroups];
  __shared__ SlabMemory memories[kGroups];
  __shared__ StreamView view;  // As all that is for long: registers are short.
  __shared__ RowRule rule;
  AllowNextKernel();
  const BlockWork work = FindWork(table, blockIdx.x);
  const Job& job = CopyJob(table.jobs[work.job]);
  const int slabs = StreamSlabs(job), slab = static_cast<int>(work.block % slabs);
  const int slab_first = slab * StreamRows(job), slab_rows = min(job.size[0] - slab_first, StreamRows(job));
  const int group = Group::Index(), thread = Group::Thread();
  const int first = slab_first + slab_rows * group / kGroups, last = slab_first + slab_rows * (group + 1) / kGroups;
  SlabMemory& memory = memories[group];
  const Member member{job, work.block / slabs};
  // 1. Copies begin, of what no kernel changes.
  constexpr int kRing = RingBytes(kQuads, kGroups);
  RowRing<T> ring(job, DynamicShared() + group * kRing, kRing, full[group], &copies[group]);
  if (thread == 0) ring.Begin(NumbersOf<T>(member) + int64_t{first} * StreamColumns(job), last - first);
  AwaitKernelBefore();
  // 2. The columns' and the rows' terms. All that is read is on its way at once.
  StreamColumnsOf<kQuads, kGroups, T> columns(member.At<float>(job.at.stream_terms), StreamColumns(job));
  const EngineState& state = *member.state(0);
  RowSource source = LoadRowSource(member, max(first, min(first + thread, last - 1)));
  const bool idle = !IsStreamed(job, state) || (pass == Pass::kIterate && state.stopped);
  if (threadIdx.x == 0) {
    view = StreamViewOf(member, state);
    rule = RowRuleOf(member, state, pass);
  }
  __syncthreads();  // They are there.
  if (idle) {
    if (thread == 0) ring.Abandon(last - first);
    return;
  }
  columns.factor = view.factor;
  // 3. Rows.
  const RowBlock block = {member.index, 0, slab, 0, 1};
  const bool judged = pass != Pass::kIterate || job.solver.tolerance > 0;
  BlockStats stats = NoStats();
  for (int begin = first; begin < last; begin += kSlabRows) {
    const int rows = min(kSlabRows, last - begin), i = begin + thread;
    const bool mine = thread < rows;
    if (mine && begin > first) source = LoadRowSource(member, i);
    if (mine) StoreRow(view, state, source, thread, rule.damping, &memory);
    Group::Wait();
    SumRows(&ring, rows, rule, &memory, &columns);
    Group::Wait();
    if (!mine) continue;
    const double lse =
        LogOf(memory.sums[thread]) - memory.rows[thread].term + (view.reference - view.Base(0, i)) * view.scale;
    BlockStats own = NoStats();
    if (pass == Pass::kIterate) {
      IterateRow(member, block, 0, i, memory.steps[thread], lse, view.scale, judged, &own);
    } else {
      MeasureRow(member, block, 0, i, lse, view.scale, &own);
    }
    stats = Combine(stats, own);
  }
  // 4. The columns' sums, and what the rows say.
  columns.Store(member.At<float>(job.at.stream_partial) + int64_t{slab} * StreamColumns(job));
  if (judged) StoreStats(stats, pass == Pass::kMeasure, member.stats(0, 0) + slab);
#endif
}

#if SINKHORN_HOPPER

// log2 of a column's sum over the rows, at their new potentials, seen from the column's base: read again, in double,
// under its maximum. All threads call it, for the block's columns.
template <typename T>
__device__ double LogSumOfColumn(const Member& member, double scale, double reference, const double* row_phi, int j) {
  __shared__ double maxima[kEndParts][kEndColumns], sums[kEndParts][kEndColumns];
  const Job& job = member.job;
  const int part = threadIdx.x / kEndColumns, column = threadIdx.x % kEndColumns;
  const T* numbers = NumbersOf<T>(member) + j;
  const double* base = job.dense ? nullptr : member.At<double>(job.at.frame[0]);
  const double factor = job.dense ? -scale : 1;
  const auto exponent = [&](int i) {
    const double phi = row_phi[i] - (base != nullptr ? base[i] : 0) + reference;
    return LoadNumber(numbers + int64_t{i} * StreamColumns(job)) * factor + phi * scale + member.log_mass(0)[i];
  };
  double max = kVoid, sum = 0;
  for (int i = part; i < job.size[0]; i += kEndParts) max = fmax(max, exponent(i));
  for (int i = part; i < job.size[0]; i += kEndParts) sum += exp2(exponent(i) - max);
  maxima[part][column] = max;
  sums[part][column] = sum;
  __syncthreads();
  for (int k = 0; k < kEndParts; ++k) max = fmax(max, maxima[k][column]);
  sum = 0;
  for (int k = 0; k < kEndParts; ++k) sum += sums[k][column] * exp2(maxima[k][column] - max);
  return max + log2(sum);
}
__device__ inline double LogSumOfColumn(const Job& job, int64_t index, double scale, double reference,
                                        const double* row_phi, int j) {
  const Member member{job, index};
  return KeepsHalves(job) ? LogSumOfColumn<__half>(member, scale, reference, row_phi, j)
                          : LogSumOfColumn<float>(member, scale, reference, row_phi, j);
}

#endif

// Columns: the slabs' sums, and what follows for the engine.
__global__ void __launch_bounds__(kThreads, 2) StreamEndKernel(LaunchTable table, Pass pass) {
#if SINKHORN_HOPPER
  __shared__ double parts[kEndWarps][kEndColumns];
  AllowNextKernel();
  const BlockWork work = FindWork(table, blockIdx.x);
  const Job& job = CopyJob(table.jobs[work.job]);
  const int blocks = RowBlocks(job, 0, 1, Geometry::kStream), slabs = StreamSlabs(job);
  const Member member{job, work.block / blocks};
  const RowBlock block = {member.index, 0, static_cast<int>(work.block % blocks), 0, 1};
  const int first = block.block * kEndColumns, of_block = threadIdx.x % kEndColumns, column = first + of_block;
  const int j = min(column, job.size[1] - 1);
  const bool there = column < job.size[1], iterates = pass == Pass::kIterate;
  const bool judged = !iterates || job.solver.tolerance > 0;
  AwaitKernelBefore();
  // 1. Sums over the slabs. All that is read is on its way at once, of both parities.
  EngineState* state = member.state(0);
  const int warp = threadIdx.x / 32, pair = 2 * (threadIdx.x % 32);
  const float* partial = member.At<float>(job.at.stream_partial) + min(first + pair, StreamColumns(job) - 2);
  double sums[2] = {0, 0};
#pragma unroll 16
  for (int k = warp; k < slabs; k += kEndWarps) {
    const float2 both = *reinterpret_cast<const float2*>(partial + int64_t{k} * StreamColumns(job));
    sums[0] += both.x;
    sums[1] += both.y;
  }
  const double phi_of[2] = {member.phi(0, 0, 1)[j], member.phi(0, 1, 1)[j]};
  const double base = job.dense ? 0 : member.At<double>(job.at.frame[1])[j], log_mass = member.log_mass(1)[j];
  RowStep row = {0, member.Shift(0, 1, j), member.mass(1)[j], state->epsilon, state->relax, state->parity};
  const bool idle = !IsStreamed(job, *state) || (iterates && state->stopped);
  const double scale = kLog2E / state->epsilon, reference = *member.At<double>(job.at.stream_reference);
  const double least = kLeastShare * state->total_mass[0];
  row.phi = row.parity == 0 ? phi_of[0] : phi_of[1];
  if (idle) return;
  parts[warp][pair] = sums[0];
  parts[warp][pair + 1] = sums[1];
  unsigned* arrivals = member.At<unsigned>(job.at.arrivals) + job.at.arrival_stride - 1;
  // The state moves on when all have read it, if residuals decide nothing.
  if (!judged) {
    if (LastToArrive(arrivals, blocks) && threadIdx.x == 0) EndColumns(job, 0, state, 0);
  } else {
    __syncthreads();
  }
  double sum = 0;
  for (int k = 0; k < kEndWarps; ++k) sum += parts[k][of_block];
  // 2. Their logarithms. Columns without mass, which no row sees, get their potentials when all is measured.
  const bool is_void = log_mass <= kVoid;
  const auto term_of = [&](double phi) { return static_cast<float>((phi - base - reference) * scale + log_mass); };
  const float term = term_of(row.phi);
  const double seen = -(reference + base) * scale;
  double lse = log2(sum) - term + seen;
  const bool again = there && (is_void ? !iterates : !(sum > least && sum < INFINITY));
  if (__syncthreads_or(again)) {
    const double* row_phi = member.phi(0, iterates ? row.parity ^ 1 : row.parity, 0);
    const double whole = LogSumOfColumn(job, member.index, scale, reference, row_phi, j);
    if (again) lse = whole + seen;
  }
  // 3. What becomes of the columns.
  BlockStats stats = NoStats();
  if (there && threadIdx.x < kEndColumns) {
    if (iterates && is_void) {
      member.phi(0, row.parity ^ 1, 1)[j] = row.phi;
    } else if (iterates) {
      IterateRow(member, block, 1, j, row, lse, scale, judged, &stats);
      member.At<float>(job.at.stream_terms)[j] = term_of(member.phi(0, row.parity ^ 1, 1)[j]);
    } else {
      // Others may still read the potential that such a column had.
      const double reference_phi = member.phi(0, row.parity, 1)[0];
      MeasuredPoint point = {row.phi, row.shift, row.mass, log_mass, -reference_phi};
      if (is_void) {
        point.phi = HalfStep(row.phi, lse, scale, row.shift, row.epsilon, job.solver.rho_b, 1);
        member.phi(0, row.parity ^ 1, 1)[j] = point.phi;
      }
      member.ratio(0, 1)[j] = MeasurePoint(point, job.solver.rho_b, lse, scale, &stats);
    }
  }
  if (!judged) return;
  StoreStats(stats, pass == Pass::kMeasure, member.stats(0, 1) + block.block);
  if (!LastToArrive(arrivals, blocks)) return;
  EndPass(member, block, 0, pass, slabs);
  __syncthreads();
  if (iterates && state->stopped) return;  // The potentials before were the answer.
  EndPass(member, block, 1, pass, blocks);
  if (iterates) return;
  for (int k = threadIdx.x; k < job.size[1]; k += kThreads) {
    if (member.log_mass(1)[k] <= kVoid) member.phi(0, row.parity, 1)[k] = __ldcg(member.phi(0, row.parity ^ 1, 1) + k);
  }
#endif
}

}  // namespace

StreamLaunch StreamLaunchOf(const Job& job) {
  const int columns = StreamColumns(job), quads = static_cast<int>(CeilDiv(columns, kQuadColumns));
  return {KeepsHalves(job), columns <= kPairedColumns ? 2 : 1,
          quads > 12 ? 16 : static_cast<int>(CeilDiv(quads, 2)) * 2};
}
int64_t StreamTermsBlocks(const Job& job) { return job.count * CeilDiv(StreamColumns(job), kThreads); }
int64_t StreamEndBlocks(const Job& job) { return job.count * RowBlocks(job, 0, 1, Geometry::kStream); }

void LaunchStreamTerms(const LaunchTable& table, int64_t blocks, cudaStream_t stream) {
  LaunchKernel(StreamTermsKernel, blocks, kThreads, 0, stream, table);
}
void LaunchStream(const LaunchTable& table, int64_t blocks, const StreamLaunch& of, Pass pass, cudaStream_t stream) {
  const auto launch = [&](void (*of_floats)(LaunchTable, Pass), void (*of_halves)(LaunchTable, Pass)) {
    LaunchOverlapping(of.halves ? of_halves : of_floats, blocks, of.groups * kGroupThreads, kStreamBytes, stream, table,
                      pass);
  };
  switch (of.quads) {
    case 2:
      return launch(StreamKernel<2, 2, float>, StreamKernel<2, 2, __half>);
    case 4:
      return launch(StreamKernel<4, 2, float>, StreamKernel<4, 2, __half>);
    case 6:
      return launch(StreamKernel<6, 1, float>, StreamKernel<6, 1, __half>);
    case 8:
      return launch(StreamKernel<8, 1, float>, StreamKernel<8, 1, __half>);
    case 10:
      return launch(StreamKernel<10, 1, float>, StreamKernel<10, 1, __half>);
    case 12:
      return launch(StreamKernel<12, 1, float>, StreamKernel<12, 1, __half>);
    default:
      return launch(StreamKernel<16, 1, float>, StreamKernel<16, 1, __half>);
  }
}
void LaunchStreamEnd(const LaunchTable& table, int64_t blocks, Pass pass, cudaStream_t stream) {
  LaunchOverlapping(StreamEndKernel, blocks, kThreads, 0, stream, table, pass);
}

}  // namespace cuda
}  // namespace sinkhorn
