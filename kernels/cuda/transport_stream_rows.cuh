// A slab of rows on its way through a block of the sweep (transport_stream.cu): the ring that brings them to shared
// memory ahead of their use, the densities that threads make of their columns, and what becomes of them.
#ifndef SINKHORN_KERNELS_CUDA_TRANSPORT_STREAM_ROWS_CUH_
#define SINKHORN_KERNELS_CUDA_TRANSPORT_STREAM_ROWS_CUH_

#include "kernels/cuda/transport_stream.cuh"

namespace sinkhorn {
namespace cuda {

constexpr int kGroupThreads = 256;  // Few: what they do once a row, all of them do.
constexpr int kQuadColumns = 4 * kGroupThreads;
constexpr int kStreamBytes = 200 * 1024;  // Of shared memory: rows on their way, columns' terms.

// Rows that are short are divided among two groups of a block's threads: while one waits, the other makes densities.
constexpr int GroupsOf(int quads) { return quads <= 4 ? 2 : 1; }
// What registers have room for: rows whose densities a thread has at once, those of the next rows beside them (floats
// come no faster than memory gives them), columns' terms.
constexpr int RowsAtOnce(int quads) { return quads == 2 || quads == 6 ? 2 : 1; }
constexpr bool MakesAhead(int quads, bool halves) { return quads <= 10 && halves; }
// Quads that all threads have, of jobs that a kernel for so many serves.
constexpr int QuadsFull(int quads) { return quads - (quads <= 12 ? 2 : 4); }
constexpr int HeldQuads(int quads) { return quads <= 10 ? quads : quads == 12 ? 8 : 4; }
constexpr int TermBytes(int quads) {
  return (quads - HeldQuads(quads)) * kQuadColumns * static_cast<int>(sizeof(float));
}
constexpr int RingBytes(int quads) { return (kStreamBytes - TermBytes(quads)) / GroupsOf(quads) / 128 * 128; }

#if SINKHORN_HOPPER

constexpr int kBlockRows = 128;  // That a block has the data of at once.
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
  __device__ static void Wait() { WaitAt(1 + Index(), kGroupThreads); }
  // Of one value of each thread, in every thread. `parts`: a float for each warp.
  template <typename Combine>
  __device__ static float CombineAll(float value, float* parts, Combine combine) {
    value = CombineOverWarp(value, 32, combine);
    Wait();  // What is there has been read.
    if (threadIdx.x % 32 == 0) parts[Thread() / 32] = value;
    Wait();
    return CombineOverWarp(parts[threadIdx.x % kWarps], kWarps, combine);
  }
};

// What a row's densities are made of and weighted by.
struct SlabRow {
  float term;
  float mass;      // Where rows do not move: times 2^rounding.
  float rounding;  // What the term, as a float, lacks.
  float pull;      // (damping - 1) (phi + shift) s
};
// How rows move; the same for all of a pass.
struct RowRule {
  bool plain;    // To the marginal.
  bool present;  // Columns see them where they are: symmetric updates; and where they are measured.
  float relax, damping;
  // What densities, `sum` of which times 2^level are the row's, are weighted by: its mass, at its new potential.
  __device__ float Weight(const SlabRow& row, float sum, float level) const {
    if (plain) return row.mass * FastReciprocal(sum);
    const float lse = log2f(sum) + level + row.rounding;
    const float move = row.rounding + relax * (row.pull - damping * lse);
    const float weight = FastExp2(present ? level : move + level);
    if (weight < kMostWeight) return row.mass * weight;
    return row.mass > 0 ? INFINITY : 0;  // All columns are read again.
  }
};
__device__ inline RowRule RowRuleOf(const Member& member, int engine, const EngineState& state, Pass pass) {
  const double rho = RhoOf(member.job, engine, 0);
  const bool present = pass == Pass::kMeasure || IsSymmetric(member.job, engine);
  return {!present && state.relax == 1 && isinf(rho), present, static_cast<float>(state.relax),
          static_cast<float>(DampingOf(state.epsilon, rho))};
}

// The rows that a group has at once.
template <int kGroups>
struct SlabMemory {
  static constexpr int kRows = kBlockRows / kGroups;
  alignas(16) SlabRow rows[kRows];
  RowStep steps[kRows];
  ScaledSum sums[kRows];
  BlockStats stats[kRows];  // Of each of its threads that have rows.
};

// The ring of rows on their way through shared memory, some to a stage: a thread takes hundreds of cycles to begin a
// copy, and all others of its group wait for it at the next row. Where rows come from the last to the first, so do
// those of a stage, and one that is not full lacks its first.
template <typename T>
class RowRing {
 public:
  // What is left to copy, and the rows that have been read: of one thread alone, in shared memory.
  struct Copies {
    const T* next;
    int left, stage, read;
  };
  // In so much of dynamic shared memory, from `base` on.
  __device__ RowRing(int columns, bool backwards, char* base, int ring_bytes, uint64_t* full, Copies* copies)
      : base_(reinterpret_cast<T*>(base)), full_(full), copies_(copies), columns_(columns), backwards_(backwards) {
    constexpr int kStagesWanted = 3, kStageRowsMost = 8;
    const int rows = ring_bytes / (columns_ * static_cast<int>(sizeof(T)));
    stage_rows_ = max(1, min(rows / kStagesWanted, kStageRowsMost));
    stages_ = min(rows / stage_rows_, kMostStages);
  }
  // By one thread: the first copies, of rows from `first` on.
  __device__ void Begin(const T* first, int rows) const {
    for (int stage = 0; stage < stages_; ++stage) InitBarrier(&full_[stage], 1);
    FenceBarriers();
    *copies_ = {backwards_ ? first + int64_t{rows} * columns_ : first, rows, 0, 0};
    for (int stage = 0; stage < stages_; ++stage) Copy(stage);
  }
  // The next row, by its place in the ring.
  __device__ int Await() {
    if (read_ == 0) WaitForPhase(&full_[stage_], phase_);
    const int place = stage_ * stage_rows_ + (backwards_ ? stage_rows_ - 1 - read_ : read_);
    if (++read_ == stage_rows_) {
      read_ = 0;
      if (++stage_ == stages_) stage_ = 0, phase_ ^= 1;
    }
    return place;
  }
  __device__ const T* At(int place) const { return base_ + place * columns_; }
  // By the thread that began them, when all have read the next row.
  __device__ void Release() const {
    if (++copies_->read < stage_rows_) return;
    copies_->read = 0;
    Copy(copies_->stage);
    if (++copies_->stage == stages_) copies_->stage = 0;
  }
  // By the same thread, before the block leaves without having read any.
  __device__ void Abandon(int rows) const {
    for (int stage = 0; stage < stages_ && stage * stage_rows_ < rows; ++stage) WaitForPhase(&full_[stage], 0);
  }

 private:
  __device__ void Copy(int stage) const {
    const int rows = min(copies_->left, stage_rows_), numbers = rows * columns_;
    if (rows == 0) return;
    const unsigned bytes = numbers * static_cast<int>(sizeof(T));
    const T* from = backwards_ ? copies_->next - numbers : copies_->next;
    ArriveExpecting(&full_[stage], bytes);
    CopyBulk(SharedAddress(At(stage * stage_rows_ + (backwards_ ? stage_rows_ - rows : 0))), from, bytes,
             &full_[stage]);
    copies_->next = backwards_ ? from : from + numbers;
    copies_->left -= rows;
  }

  T* const base_;
  uint64_t* const full_;
  Copies* const copies_;
  const int columns_;
  const bool backwards_;
  int stages_, stage_rows_;
  int stage_ = 0, phase_ = 0, read_ = 0;  // Of the next row; rows of that stage that were awaited.
};

// A thread's columns.
template <int kQuads, typename T>
struct StreamColumnsOf {
  static constexpr int kHeld = HeldQuads(kQuads);
  float held[kHeld > 0 ? kHeld : 1][4], sums[kQuads][4];
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
        if (q < kHeld) held[q][k] = terms[k];
        sums[q][k] = 0;
      }
      if (q >= kHeld) Shared()[Quad(q - kHeld)] = make_float4(terms[0], terms[1], terms[2], terms[3]);
    }
  }
  __device__ static int Quad(int q) { return Group::Thread() + kGroupThreads * q; }
  // Terms of the columns that are not held, behind the ring.
  __device__ static float4* Shared() {
    return reinterpret_cast<float4*>(DynamicShared() + GroupsOf(kQuads) * RingBytes(kQuads));
  }
  // The exponents of a row, seen from its level.
  __device__ void Load(const T* row, float term, float (&e)[kQuads][4]) const {
#pragma unroll
    for (int q = 0; q < kQuads; ++q) {
      float z[4], terms[4];
      // Terms of columns that are not there make densities nothing.
      LoadQuad(row, q < QuadsFull(kQuads) ? Quad(q) : min(Quad(q), quads - 1), z);
      if (q < kHeld) {
        for (int k = 0; k < 4; ++k) terms[k] = held[q][k];
      } else {
        LoadQuad(reinterpret_cast<const float*>(Shared()), Quad(q - kHeld), terms);
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

// Some rows at a time, whose densities are this thread's of its columns.
template <int kQuads, typename T>
class SlabSums {
 public:
  static constexpr int kRows = RowsAtOnce(kQuads);
  using Memory = SlabMemory<GroupsOf(kQuads)>;
  struct Densities {
    float t[kRows][kQuads][4], sum[kRows];
    int place[kRows];  // Of the row.
  };
  // Threads' parts of rows' sums.
  using Parts = float[kRows][kGroupThreads];
  __device__ SlabSums(int rows, const RowRule& rule, Memory* memory, RowRing<T>* ring,
                      StreamColumnsOf<kQuads, T>* columns)
      : rows_(rows),
        moving_(!rule.present),
        plain_(rule.plain || rule.present),
        rule_(rule),
        memory_(memory),
        ring_(ring),
        columns_(columns) {}

  // Rows from `row` on, which come: their places. A row that is not there repeats the one before.
  __device__ void Await(int row, const Densities& before, Densities* next) {
    int place = before.place[kRows - 1];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      if (row + r < rows_) place = ring_->Await();
      next->place[r] = place;
    }
  }
  __device__ void Make(int row, Densities* made) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const float term = row + r < rows_ ? memory_->rows[row + r].term : static_cast<float>(kVoid);
      columns_->Load(ring_->At(made->place[r]), term, made->t[r]);
      made->sum[r] = columns_->Densities(made->t[r]);
    }
  }
  // This thread's parts of their sums; Weigh when all are there.
  __device__ void Tell(const Densities& made, Parts* parts) const {
#pragma unroll
    for (int r = 0; r < kRows; ++r) (*parts)[r][Group::Thread()] = made.sum[r];
  }
  // What the rows are weighted by, if that is plain; whether it is.
  __device__ bool Weigh(int row, const Parts& parts, float (&sum)[kRows], float (&weight)[kRows]) const {
    bool plain = plain_;
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const auto* part = reinterpret_cast<const float4*>(parts[r]) + threadIdx.x % 32;
      const float4 a = part[0], b = part[32];
      sum[r] = (a.x + a.y) + (a.z + a.w) + ((b.x + b.y) + (b.z + b.w));
    }
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      sum[r] = CombineOverWarp(sum[r], 32, Sum);
      const bool there = row + r < rows_;
      weight[r] = there ? memory_->rows[min(row + r, rows_ - 1)].mass * (moving_ ? FastReciprocal(sum[r]) : 1) : 0;
      plain = plain && (!there || IsSafe(sum[r]));
    }
    return plain;
  }
  // The same where it is not. Rows whose sums are not safe are made again, under their maximum.
  __device__ void WeighAgain(int row, float* scratch, Densities* made, float (&sum)[kRows], float (&weight)[kRows]) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      if (row + r >= rows_) continue;
      float level = 0;
      if (!IsSafe(sum[r])) level = MakeAgain(row + r, scratch, made->place[r], made->t[r], &sum[r]);
      weight[r] = rule_.Weight(memory_->rows[row + r], sum[r], level);
      if (Group::Thread() == 0) memory_->sums[row + r].level = level;
    }
  }
  __device__ void Store(int row, const float (&sum)[kRows]) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      if (Group::Thread() == 0 && row + r < rows_) memory_->sums[row + r].sum = sum[r];
    }
  }
  // All have read these rows: others may take their places.
  __device__ void Release(int row) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      if (Group::Thread() == 0 && row + r < rows_) ring_->Release();
    }
  }
  __device__ void Add(const Densities& made, const float (&weight)[kRows]) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) columns_->Add(made.t[r], weight[r]);
  }

 private:
  // Returns the maximum.
  __device__ float MakeAgain(int row, float* scratch, int place, float (&t)[kQuads][4], float* sum) {
    const T* at = ring_->At(place);
    const float term = memory_->rows[row].term;
    columns_->Load(at, term, t);
    float most = static_cast<float>(kVoid);
#pragma unroll
    for (int q = 0; q < kQuads; ++q) {
#pragma unroll
      for (int k = 0; k < 4; ++k) most = fmaxf(most, t[q][k]);
    }
    most = Group::CombineAll(most, scratch, Larger);
    columns_->Load(at, term - most, t);
    *sum = Group::CombineAll(columns_->Densities(t), scratch, Sum);
    return most;
  }

  const int rows_;
  const bool moving_, plain_;  // What the rule says; whether sums alone tell weights.
  const RowRule& rule_;
  Memory* const memory_;
  RowRing<T>* const ring_;
  StreamColumnsOf<kQuads, T>* const columns_;
};

// `rows` rows, whose data are in memory. What rows are weighted by is found while the next rows' densities are made,
// where registers have room for both, without a branch in between: the compiler mixes the two.
template <int kQuads, typename T>
__device__ void SumRows(RowRing<T>* ring, int rows, const RowRule& rule, SlabMemory<GroupsOf(kQuads)>* memory,
                        StreamColumnsOf<kQuads, T>* columns) {
  using Sums = SlabSums<kQuads, T>;
  constexpr int kRows = Sums::kRows, kGroups = GroupsOf(kQuads);
  constexpr bool kAhead = MakesAhead(kQuads, sizeof(T) == sizeof(__half));
  using Densities = typename Sums::Densities;
  alignas(16) __shared__ typename Sums::Parts all_parts[kGroups][2];
  __shared__ float all_scratch[kGroups][Group::kWarps];
  auto& parts = all_parts[Group::Index()];
  float* const scratch = all_scratch[Group::Index()];
  Sums sums(rows, rule, memory, ring, columns);
  Densities even, odd;
  even.place[kRows - 1] = 0;
  sums.Await(0, even, &even);
  sums.Make(0, &even);
  // Ahead of the last rows there are none: what is made of these again nobody reads.
  const auto step = [&](int row, int turn, Densities* made, Densities* next) {
    float sum[kRows], weight[kRows];
    sums.Tell(*made, &parts[turn]);
    if (kAhead) sums.Await(row + kRows, *made, next);
    Group::Wait();  // All have read the rows, and their sums' parts are there.
    const bool plain = sums.Weigh(row, parts[turn], sum, weight);
    if (kAhead) sums.Make(row + kRows, next);
    if (!plain) sums.WeighAgain(row, scratch, made, sum, weight);
    sums.Store(row, sum);
    if (!kAhead || row + kRows < rows) sums.Release(row);
    sums.Add(*made, weight);
    if (kAhead || row + kRows >= rows) return;
    sums.Await(row + kRows, *made, next);
    sums.Make(row + kRows, next);
  };
  for (int row = 0; row < rows; row += 2 * kRows) {
    step(row, 0, &even, kAhead ? &odd : &even);
    if (row + kRows < rows) step(row + kRows, 1, kAhead ? &odd : &even, &even);
  }
  Group::Wait();
  if (kAhead) sums.Release((rows - 1) / kRows * kRows);
}

// What a row's data are made of, of both parities: read before the state is known.
struct RowSource {
  double phi[2], base, mass, shift;
};
__device__ inline RowSource LoadRowSource(const Member& member, int engine, int i) {
  return {{member.phi(engine, 0, 0)[i], member.phi(engine, 1, 0)[i]},
          BaseOf(member, engine, 0, i),
          member.mass(MeasureOf(engine, 0))[i],
          member.Shift(engine, 0, i)};
}
template <int kGroups>
__device__ inline void StoreRow(const StreamFrame& frame, const EngineState& state, const RowSource& source, int k,
                                const RowRule& rule, SlabMemory<kGroups>* memory) {
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
  row.mass = static_cast<float>(step.mass) * (rule.present ? FastExp2(row.rounding) : 1);
  row.pull = rule.damping == 1 ? 0 : static_cast<float>((rule.damping - 1) * (step.phi + step.shift) * frame.scale);
  memory->rows[k] = row;
  memory->steps[k] = step;
  memory->sums[k].level = 0;
}

#endif

}  // namespace cuda
}  // namespace sinkhorn

#endif  // SINKHORN_KERNELS_CUDA_TRANSPORT_STREAM_ROWS_CUH_
