// A slab of rows on its way through a block of the sweep (transport_stream.cu): the ring that brings them to shared
// memory ahead of their use, the densities that threads make of their columns, and what becomes of them.
#ifndef SINKHORN_KERNELS_CUDA_TRANSPORT_STREAM_ROWS_CUH_
#define SINKHORN_KERNELS_CUDA_TRANSPORT_STREAM_ROWS_CUH_

#include "kernels/cuda/transport_stream.cuh"

namespace sinkhorn {
namespace cuda {

constexpr int kGroupThreads = 256;  // Few: what they do once a row, all of them do.
constexpr int kQuadColumns = 4 * kGroupThreads;
constexpr int kStreamBytes = 205 * 1024;  // Of shared memory: rows on their way, and columns' terms.
// Rows that are short are divided among two groups of a block's threads, so that one adds up while the other makes
// densities. Of longer ones registers have room for one group, which makes the next densities before it adds up.
constexpr int GroupsOf(int quads) { return quads <= 4 ? 2 : 1; }

#if SINKHORN_HOPPER

// What registers have room for: rows whose densities a thread has at once, those of the next rows beside them, columns'
// terms.
constexpr int RowsAtOnce(int quads) { return quads == 2 || quads == 6 ? 2 : 1; }
constexpr bool MakesAhead(int quads) { return GroupsOf(quads) == 1 && quads <= 12; }
// Quads that all threads have, of jobs that a kernel for so many serves.
constexpr int QuadsFull(int quads) { return quads - (quads <= 12 ? 2 : 4); }
constexpr bool HoldsTerms(int quads) { return quads <= 10; }
constexpr int TermBytes(int quads) {
  return HoldsTerms(quads) ? 0 : quads * kQuadColumns * static_cast<int>(sizeof(float));
}
constexpr int RingBytes(int quads) { return (kStreamBytes - TermBytes(quads)) / GroupsOf(quads) / 128 * 128; }
constexpr int kSlabRows = 64;  // That a group has the data of at once.
constexpr int kMostStages = 16;

__device__ inline bool IsSafe(float row_sum) { return row_sum > 1 / kMostWeight && row_sum < kMostWeight; }

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
  bool plain;      // To the marginal.
  bool measuring;  // They do not. Not told by a relax of 0: registers spill.
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
template <int kQuads, typename T>
struct StreamColumnsOf {
  static constexpr bool kHolds = HoldsTerms(kQuads);
  float held[kHolds ? kQuads : 1][4], sums[kQuads][4];
  int quads;     // Of a row.
  float factor;  // Of rows' numbers; known later.

  // `all`: of all columns.
  __device__ StreamColumnsOf(const float* all, int count) : quads(count / 4), factor(1) {
    constexpr float kNothing = static_cast<float>(kVoid);
#pragma unroll
    for (int q = 0; q < kQuads; ++q) {
      float terms[4] = {kNothing, kNothing, kNothing, kNothing};
      if (Quad(q) < quads) LoadQuad(all, Quad(q), terms);
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
    if constexpr (GroupsOf(kQuads) == 2) {
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

// Some rows at a time of a group, whose densities are this thread's of its columns.
template <int kQuads, typename T>
class SlabSums {
 public:
  static constexpr int kRows = RowsAtOnce(kQuads);
  struct Densities {
    float t[kRows][kQuads][4], sum[kRows];
    int place[kRows];  // Of the row.
  };
  __device__ SlabSums(SlabMemory* memory, const RowRule& rule, RowRing<T>* ring, StreamColumnsOf<kQuads, T>* columns)
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
  // The warp's part of their sums; Weigh when all warps' are there.
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
  StreamColumnsOf<kQuads, T>* const columns_;
};

// `rows` rows, whose data are in memory. A group's sums meet while the next densities are made: by itself where it
// makes ahead, else by the other group.
template <int kQuads, typename T>
__device__ void SumRows(RowRing<T>* ring, int rows, const RowRule& rule, SlabMemory* memory,
                        StreamColumnsOf<kQuads, T>* columns) {
  using Sums = SlabSums<kQuads, T>;
  constexpr int kRows = Sums::kRows, kGroups = GroupsOf(kQuads);
  constexpr bool kAhead = MakesAhead(kQuads);
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

// What a row's data are made of, of both parities: read before the state is known.
struct RowSource {
  double phi[2], base, mass, shift;
};
__device__ inline RowSource LoadRowSource(const Member& member, int i) {
  return {
      {member.phi(0, 0, 0)[i], member.phi(0, 1, 0)[i]}, BaseOf(member, 0, i), member.mass(0)[i], member.Shift(0, 0, i)};
}
__device__ inline void StoreRow(const StreamFrame& frame, const EngineState& state, const RowSource& source, int k,
                                double damping, SlabMemory* memory) {
  const RowStep step = {state.parity == 0 ? source.phi[0] : source.phi[1],
                        source.shift,
                        source.mass,
                        state.epsilon,
                        state.relax,
                        state.parity};
  const double term = frame.RowTerm(step.phi, source.base);
  SlabRow row;
  row.term = static_cast<float>(term);
  row.rounding = static_cast<float>(term - row.term);
  row.mass = static_cast<float>(step.mass);
  row.pull = damping == 1 ? 0 : static_cast<float>((damping - 1) * (step.phi + step.shift) * frame.scale);
  memory->rows[k] = row;
  memory->steps[k] = step;
}

#endif

}  // namespace cuda
}  // namespace sinkhorn

#endif  // SINKHORN_KERNELS_CUDA_TRANSPORT_STREAM_ROWS_CUH_
