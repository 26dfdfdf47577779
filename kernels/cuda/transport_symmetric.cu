// Iterations whose two sides move at once, of points of few coordinates, many in one launch (Hopper): symmetric updates
// of large problems, and OT(a, a) and OT(b, b) of debiased ones.
//
// Both sides see the potentials before, so a density 2^(z + row term + column term), made of the points, is all that
// its row and its column want of a pair. A block has some rows; of OT(a, a), whose columns are its rows, it takes half
// of all pairs: with its own points and those of half of the blocks after it, in a circle. A warp goes over all rows
// with 64 columns at a time, eight to a lane, whose sums stay in registers; a row's are added up by eight lanes. What
// columns sum up to goes to the blocks that look after them, and their new terms come back from there, both through
// memory, by numbers that say of which turn they are. Then all tell each other how far marginals were from where they
// should be, and decide alike, by the rules of transport_control.cuh, annealing included. The last potentials are
// measured.
#include <algorithm>

#include "kernels/cuda/transport_stream_held.cuh"
#include "kernels/cuda/transport_symmetric.cuh"

namespace sinkhorn {
namespace cuda {
namespace {

#if SINKHORN_HOPPER

// Of a warp: lanes side by side, that have the same rows or the same columns, and how many of those a lane has; of
// rows, at the end half as many.
constexpr int kRowLanes = 4, kColumnLanes = 32 / kRowLanes;
constexpr int kLaneRows = 4, kGroupRows = kLaneRows * kRowLanes, kLaneColumns = kSymmetricColumns / kColumnLanes;
static_assert(kSymmetricRows == kGroupRows / 2 && kLaneColumns == 2 * kRowLanes, "rows and columns of lanes");

// A side's points that a block looks after, in shared memory.
struct OwnPoints {
  int first, count, size;  // `size`: with those that are none, which come last.
  double* phi[2];          // By parity.
  float *term, *sum, *mass;
};

struct SymmetricMemory {
  SymmetricShape shape;
  EngineState states[2];            // By turn: after it.
  int judged;                       // The last turn that counts.
  OwnPoints rows, columns;          // Of engines 1 and 2 the same.
  float4 parts[kSymmetricThreads];  // Of columns' sums.
  double scratch[kMostWarps];
  double reference;
  bool lost;
  __device__ const EngineState& state() const { return states[judged & 1]; }
};

// In dynamic shared memory, before all that blocks look after: of rows their points' coordinates, as exponents want
// them, and terms; masses, a lane's side by side; sums, by warp.
struct RowsInPairs {
  __device__ explicit RowsInPairs(int rows)
      : points(reinterpret_cast<float4*>(DynamicShared())),
        weights(reinterpret_cast<float*>(points + rows)),
        sums(weights + rows),
        end(sums + kSymmetricWarps * rows) {}
  float4* points;
  float *weights, *sums, *end;
};

__device__ inline void StoreTaggedPair(float* at, float x, float y, uint32_t tag) {
  asm volatile("st.relaxed.gpu.global.v2.u32 [%0], {%1, %2};" ::"l"(at), "r"(Tagged(x, tag)), "r"(Tagged(y, tag))
               : "memory");
}

// Over lanes whose numbers differ in the bits from kMask down to kLeast: of kLeft sums each adds up half, by the first
// bit, then half of those; when one is left, all of them do.
template <int kMask, int kLeast, int kLeft, int kSize>
__device__ inline void AddLanes(float (&sum)[kSize]) {
  constexpr int kHalf = kLeft / 2;
  const bool upper = threadIdx.x & kMask;
#pragma unroll
  for (int k = 0; k < kHalf; ++k) {
    const float other = __shfl_xor_sync(0xffffffffu, upper ? sum[k] : sum[k + kHalf], kMask);
    sum[k] = (upper ? sum[k + kHalf] : sum[k]) + other;
  }
  if constexpr (kHalf == 0) sum[0] += __shfl_xor_sync(0xffffffffu, sum[0], kMask);
  if constexpr (kMask > kLeast) AddLanes<kMask / 2, kLeast, (kHalf > 0 ? kHalf : 1)>(sum);
}

// A block's part of an engine. kSelf: engine 1 or 2. Turns are iterations begun, from 1 on.
template <int kDims, bool kSelf>
class SymmetricLoop {
 public:
  __device__ SymmetricLoop(const Member& member, int engine, int rank, SymmetricMemory* memory)
      : member_(member),
        m_(*memory),
        engine_(engine),
        rank_(rank),
        blocks_(SymmetricShapeOf(member.job, engine).blocks),
        meeting_(member.At<unsigned>(member.job.at.arrivals) + engine * member.job.at.arrival_stride, blocks_) {}

  // Up to `most` iterations.
  __device__ void Run(int most) {
    if (threadIdx.x == 0) Describe();
    __syncthreads();
    Prepare();
    meeting_.Arrive();
    meeting_.Await();
    bool measures = false;
    for (int done = 0;; ++done) {
      const int parity = m_.state().parity;
      const double epsilon = NextEpsilon(member_.job, m_.state());
      ++turn_;
      SumPairs();
      AddUp();
      Move(measures, epsilon);
      if (m_.lost || measures) break;
      if (m_.state().stopped && m_.state().parity == parity) measures = true;  // Sums are those at the answer.
      if (measures || m_.state().mode != kFloat || (done + 1 == most && !m_.state().stopped)) break;
      if (!m_.state().stopped) continue;
      if (m_.state().epsilon != epsilon) break;  // Terms are for another epsilon.
      measures = true;
    }
    measures = measures && !m_.lost;
    Store();
    if (measures) Measure();
    End(measures);
  }

 private:
  static constexpr float kMostSum = 0x1p+100f;
  __device__ static bool IsNear(float x) { return x > 1 / kMostSum && x < kMostSum; }
  __device__ static int Warp() { return threadIdx.x / 32; }
  __device__ static int Lane() { return threadIdx.x % 32; }
  __device__ static int RowLane() { return Lane() / kColumnLanes; }
  __device__ static int ColumnLane() { return Lane() % kColumnLanes; }

  __device__ OwnPoints& Columns() const { return kSelf ? m_.rows : m_.columns; }
  __device__ double ScaleOf(double epsilon) const { return kLog2E / epsilon; }
  // With what a side's potentials are seen from.
  __device__ double ReferenceOf(int side) const { return side == 0 ? m_.reference : -m_.reference; }

  // ---- Memory that all blocks see -----------------------------------------------------------------------------------

  __device__ char* Told() const { return member_.At<char>(member_.job.at.stream_sums[engine_]); }
  // What a block's columns sum up to there.
  __device__ float* SumsOf(int rank) const {
    return reinterpret_cast<float*>(Told()) + int64_t{rank} * m_.shape.columns;
  }
  // Blocks' errors on a side, of a turn: where those of two before it were.
  __device__ double* ErrorsOf(int turn, int side) const {
    return reinterpret_cast<double*>(Told() + SymmetricSumBytes(m_.shape)) + ((turn & 1) * 2 + side) * kProcessors;
  }
  // Of all points: columns'.
  __device__ float4* AllPoints() const {
    return reinterpret_cast<float4*>(Told() + SymmetricSumBytes(m_.shape) + kSymmetricErrorBytes);
  }
  __device__ float* AllTerms() const { return member_.At<float>(member_.job.at.stream_terms[engine_]); }
  __device__ static uint32_t ErrorTag(int turn) { return (turn + 1) / 2 & 1; }

  // ---- The beginning ------------------------------------------------------------------------------------------------

  __device__ void Describe() {
    const Job& job = member_.job;
    m_.shape = SymmetricShapeOf(job, engine_);
    m_.judged = 0;
    m_.states[0] = *member_.state(engine_);
    m_.reference = kSelf ? 0 : member_.phi(engine_, m_.state().parity, 1)[0];
    float* at = RowsInPairs(m_.shape.rows).end;
    at = Own(m_.shape.rows, EngineSize(job, engine_, 0), &m_.rows, at);
    if (!kSelf) Own(m_.shape.owned, EngineSize(job, engine_, 1), &m_.columns, at);
  }
  // In shared memory from `at` on; returns its end.
  __device__ float* Own(int each, int all, OwnPoints* own, float* at) const {
    own->first = rank_ * each;
    own->size = each;
    own->count = max(0, min(each, all - own->first));
    for (int parity = 0; parity < 2; ++parity) own->phi[parity] = reinterpret_cast<double*>(at) + parity * each;
    own->term = at + 4 * each;
    own->sum = own->term + each;
    own->mass = own->sum + each;
    return own->mass + each;
  }

  // Point i of a side; one that is not there has no mass, and is nowhere.
  __device__ float4 LoadPoint(int side, int i, bool there) const {
    const int dim = member_.job.dim, measure = MeasureOf(engine_, side);
    const float* at = member_.At<float>(member_.job.at.points32[measure]) + int64_t{i} * dim;
    float x[3];
#pragma unroll
    for (int k = 0; k < 3; ++k) x[k] = there && k < dim ? at[k] : 0;
    return make_float4(x[0], x[1], x[2], there ? static_cast<float>(member_.mass(measure)[i]) : 0);
  }
  __device__ void Prepare() {
    const double scale = ScaleOf(m_.state().epsilon);
    const auto term_of = [&](const OwnPoints& own, int side, int k) {
      if (k >= own.count) return static_cast<float>(kVoid);
      const double phi = member_.phi(engine_, m_.state().parity, side)[own.first + k];
      own.phi[m_.state().parity][k] = phi;
      return TermOf(side, phi, scale);
    };
    for (int k = threadIdx.x; k < m_.rows.size; k += kSymmetricThreads) {
      const float4 x = LoadPoint(0, m_.rows.first + k, k < m_.rows.count);
      m_.rows.mass[k] = x.w;
      *WeightAt(k) = x.w;
      SetTerm(0, k, term_of(m_.rows, 0, k));
      SetPoint(k, x, scale);
      if (kSelf) AllPoints()[m_.rows.first + k] = x;
    }
    if constexpr (!kSelf) {
      for (int k = threadIdx.x; k < SizeThere(1); k += kSymmetricThreads) {
        const float4 y = LoadPoint(1, m_.columns.first + k, k < m_.columns.count);
        m_.columns.mass[k] = y.w;
        AllPoints()[m_.columns.first + k] = y;
        SetTerm(1, k, term_of(m_.columns, 1, k));
      }
    }
    // What this block tells others says that it is of no turn.
    const float nothing[4] = {0, 0, 0, 0};
    for (int k = threadIdx.x; k < m_.shape.columns / 4; k += kSymmetricThreads) {
      StoreTagged(SumsOf(rank_) + 4 * k, nothing, 0);
    }
    if (threadIdx.x < 4) StoreTagged(ErrorsOf(threadIdx.x / 2, threadIdx.x % 2) + rank_, 0.0, 0);
  }
  // Where a row's mass is, for those that weight columns by it.
  __device__ float* WeightAt(int row) const {
    const int first = row / kGroupRows * kGroupRows, at = row - first;
    const int of_lane = first + kGroupRows <= m_.shape.rows ? kLaneRows : kLaneRows / 2;
    return RowsInPairs(m_.shape.rows).weights + first + at % kRowLanes * of_lane + at / kRowLanes;
  }
  __device__ float TermOf(int side, double phi, double scale) const {
    return static_cast<float>((phi + ReferenceOf(side)) * scale);
  }
  // Of own points of a side, those that others see.
  __device__ int SizeThere(int side) const {
    return kSelf || side == 0 ? m_.rows.size : min(m_.columns.size, m_.shape.columns - m_.columns.first);
  }
  __device__ static bool IsSeen(int side) { return kSelf || side == 1; }
  // Of an own point, as all others see it.
  __device__ void SetTerm(int side, int k, float term) const {
    const OwnPoints& own = side == 0 ? m_.rows : m_.columns;
    const uint32_t tag = turn_ & 1;
    if (IsSeen(side)) {
      StoreTagged(AllTerms() + own.first + k, term, tag);
      term = __uint_as_float(Tagged(term, tag));
    }
    own.term[k] = term;
    if (side == 0) RowsInPairs(m_.shape.rows).points[k].w = term;
  }
  __device__ void SetPoint(int k, const float4& x, double scale) const {
    const float factor = static_cast<float>(2 * member_.job.in.kappa * scale);
    float4& point = RowsInPairs(m_.shape.rows).points[k];
    point.x = x.x * factor, point.y = x.y * factor, point.z = x.z * factor;
  }

  // ---- Pairs --------------------------------------------------------------------------------------------------------

  // What rows and columns sum up to, of all that the block has: by warp, and on its way to others.
  __device__ void SumPairs() {
    const int rows = m_.shape.rows;
    for (int k = Lane(); k < rows; k += 32) RowsInPairs(rows).sums[Warp() * rows + k] = 0;
    __syncwarp();
    const int units = static_cast<int>(CeilDiv(m_.shape.columns, kSymmetricColumns));
#pragma unroll 1
    for (int unit = Warp(); unit < units; unit += kSymmetricWarps) SumColumns(unit);
    __syncthreads();
  }
  __device__ void SumColumns(int unit) {
    const int first = unit * kSymmetricColumns + ColumnLane() * kLaneColumns, rows = m_.shape.rows;
    const RowsInPairs all(rows);
    LaneColumns columns;
    LoadColumns(first, &columns);
    int row = 0;
#pragma unroll 1
    for (; row + kGroupRows <= rows; row += kGroupRows) SumGroup<kLaneRows>(all, row, rows, &columns);
    if (row < rows) SumGroup<kLaneRows / 2>(all, row, rows, &columns);
    AddLanes<16, kColumnLanes, kLaneColumns>(columns.sum);
    const int mine = first + kLaneColumns / kRowLanes * RowLane();
    if (first < m_.shape.columns) StoreTaggedPair(SumsOf(rank_) + mine, columns.sum[0], columns.sum[1], turn_ & 1);
  }
  struct LaneColumns {
    float4 point[kLaneColumns];  // And mass.
    float term[kLaneColumns], sum[kLaneColumns];
  };
  template <int kRows>
  struct alignas(kRows * sizeof(float)) LaneWeights {
    float row[kRows];
  };
  // Rows from `row` on, kRows to a lane.
  template <int kRows>
  __device__ void SumGroup(const RowsInPairs& all, int row, int rows, LaneColumns* columns) {
    const auto weights = reinterpret_cast<const LaneWeights<kRows>*>(all.weights + row)[RowLane()];
    float sum[kRows];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const float4 x = all.points[row + r * kRowLanes + RowLane()];
      sum[r] = 0;
#pragma unroll
      for (int c = 0; c < kLaneColumns; ++c) {
        const float4& y = columns->point[c];
        float e = fmaf(x.y, y.y, fmaf(x.x, y.x, x.w + columns->term[c]));
        if constexpr (kDims > 2) e = fmaf(x.z, y.z, e);
        const float t = FastExp2(e);
        sum[r] = fmaf(t, y.w, sum[r]);
        columns->sum[c] = fmaf(t, weights.row[r], columns->sum[c]);
      }
    }
    AddLanes<kColumnLanes / 2, 1, kRows>(sum);
    constexpr int kLanes = kColumnLanes / kRows;  // That have the same row's now.
    const int mine = row + ColumnLane() / kLanes * kRowLanes + RowLane();
    if (ColumnLane() % kLanes == 0) all.sums[Warp() * rows + mine] += sum[0];
  }
  // The lane's columns, in the order in which the block has them.
  __device__ void LoadColumns(int first, LaneColumns* columns) const {
    const bool there = first < m_.shape.columns;
    int at = there ? first : 0;
    if (kSelf) {
      at += m_.rows.first;
      if (at >= blocks_ * m_.shape.rows) at -= blocks_ * m_.shape.rows;
    }
#pragma unroll
    for (int c = 0; c < kLaneColumns; ++c) {
      columns->point[c] = __ldcg(AllPoints() + at + c);
      columns->sum[c] = 0;
    }
    const uint32_t tag = (turn_ - 1) & 1;
    float quad[4];
#pragma unroll
    for (int q = 0; q < kLaneColumns / 4; ++q) {
      const float* terms = AllTerms() + at + 4 * q;
      AwaitTagged(terms, LoadTagged(terms), tag, quad);
#pragma unroll
      for (int k = 0; k < 4; ++k) columns->term[4 * q + k] = there ? quad[k] : static_cast<float>(kVoid);
    }
  }

  // What own rows and columns sum up to over all blocks.
  __device__ void AddUp() {
    OwnPoints& columns = Columns();
    const int lanes = columns.size / 4, slices = kSymmetricThreads / lanes;
    const int lane = threadIdx.x % lanes, slice = threadIdx.x / lanes;
    const int senders = kSelf ? blocks_ / 2 : blocks_;
    if (slice < slices && 4 * lane < SizeThere(1)) {
      float sum[4] = {0, 0, 0, 0};
#pragma unroll 1
      for (int s = slice; s < senders; s += kAtOnce * slices) AddSenders(s, slices, senders, 4 * lane, sum);
      m_.parts[slice * lanes + lane] = make_float4(sum[0], sum[1], sum[2], sum[3]);
    }
    __syncthreads();
    const float* parts = reinterpret_cast<const float*>(m_.parts);
    for (int k = threadIdx.x; k < columns.count; k += kSymmetricThreads) {
      float sum = 0;
      for (int s = 0; s < slices; ++s) sum += parts[4 * lanes * s + k];
      columns.sum[k] = kSelf ? sum + SumOfRow(k) : sum;
    }
    for (int k = threadIdx.x; k < m_.rows.count && !kSelf; k += kSymmetricThreads) m_.rows.sum[k] = SumOfRow(k);
  }
  static constexpr int kAtOnce = 4;  // Senders.
  __device__ float SumOfRow(int k) const {
    float sum = 0;
#pragma unroll
    for (int warp = 0; warp < kSymmetricWarps; ++warp) sum += RowsInPairs(m_.shape.rows).sums[warp * m_.shape.rows + k];
    return sum;
  }
  // Of senders s, s + step, ..: what own columns k to k + 3 have there. All are there before any is added.
  __device__ void AddSenders(int s, int step, int senders, int k, float (&sum)[4]) const {
    const auto part_of = [&](int sender) {
      if (!kSelf) return SumsOf(sender) + m_.columns.first + k;
      const int distance = sender + 1, rank = rank_ - distance;
      return SumsOf(rank < 0 ? rank + blocks_ : rank) + distance * m_.shape.rows + k;
    };
    uint4 seen[kAtOnce];
    for (bool there = false; !there;) {
      there = true;
#pragma unroll
      for (int k = 0; k < kAtOnce; ++k) seen[k] = LoadTagged(part_of(min(s + k * step, senders - 1)));
#pragma unroll
      for (int k = 0; k < kAtOnce; ++k) there = there && IsOf(seen[k], turn_ & 1);
    }
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k) {
      if (s + k * step >= senders) continue;
      sum[0] += __uint_as_float(seen[k].x), sum[1] += __uint_as_float(seen[k].y);
      sum[2] += __uint_as_float(seen[k].z), sum[3] += __uint_as_float(seen[k].w);
    }
  }

  // ---- Potentials ---------------------------------------------------------------------------------------------------

  // The new potentials, unless those that are there are measured, and the state after the turn. `epsilon`: of the next.
  __device__ void Move(bool measures, double epsilon) {
    double error[2] = {0, 0};
    bool lost = false;
#pragma unroll
    for (int side = 0; side < (kSelf ? 1 : 2); ++side) {
      const OwnPoints& own = side == 0 ? m_.rows : m_.columns;
      for (int k = threadIdx.x; k < own.count; k += kSymmetricThreads) {
        lost = lost || !IsNear(own.sum[k]);
        if (!measures) error[side] += MovePoint(side, own, k, epsilon);
      }
      for (int k = own.count + threadIdx.x; k < SizeThere(side); k += kSymmetricThreads) {
        SetTerm(side, k, static_cast<float>(kVoid));
      }
    }
    lost = __syncthreads_or(lost);
    Tell(error, lost);
    if (Warp() == 0) Judge(measures);
    __syncthreads();
  }
  // Returns how far its marginal was from where it should be.
  __device__ double MovePoint(int side, const OwnPoints& own, int k, double epsilon) {
    const Job& job = member_.job;
    const EngineState& state = m_.state();
    const double rho = RhoOf(job, engine_, side), scale = ScaleOf(state.epsilon), reference = ReferenceOf(side);
    const double phi = own.phi[state.parity][k];
    const double shift = isinf(rho) ? 0 : member_.Shift(engine_, side, own.first + k);
    // Its own term is rounded, which its sum knows: what follows does not depend on it.
    const double term = own.term[k], log_sum = log2f(own.sum[k]);
    const float rounding = static_cast<float>((phi + reference) * scale - term);
    const double next =
        HalfStep(phi, log_sum - term + reference * scale, scale, shift, state.epsilon, rho, state.relax);
    const double next_scale = ScaleOf(epsilon);
    own.phi[state.parity ^ 1][k] = next;
    SetTerm(side, k, TermOf(side, next, next_scale));
    if (side == 0 && epsilon != state.epsilon) {
      SetPoint(k, LoadPoint(0, own.first + k, true), next_scale);
    }
    return own.mass[k] * fabs(own.sum[k] * FastExp2(rounding) - TargetRatio(phi + shift, rho));
  }
  // All other blocks.
  __device__ void Tell(double (&error)[2], bool lost) {
#pragma unroll
    for (int side = 0; side < (kSelf ? 1 : 2); ++side) {
      const double whole = BlockSum(error[side], m_.scratch);
      if (threadIdx.x == 0) {
        StoreTagged(ErrorsOf(turn_, side) + rank_, lost ? NAN : whole, ErrorTag(turn_));
      }
    }
  }
  // By one warp: the state after the turn, of all blocks' errors.
  __device__ void Judge(bool measures) {
    const double rows = AwaitErrors(0), columns = kSelf ? rows : AwaitErrors(1);
    if (Lane() != 0) return;
    m_.lost = isnan(rows) || isnan(columns);
    if (m_.lost || measures) return;
    EngineState* next = &m_.states[turn_ & 1];
    *next = m_.state();
    EndRows(member_.job, engine_, next, rows);
    EndColumns(member_.job, engine_, next, columns);
    next->mode = ModeAt(*next, next->epsilon);
    m_.judged = turn_;
  }
  __device__ double AwaitErrors(int side) const {
    constexpr int kMost = static_cast<int>(CeilDiv(kProcessors, 32));
    const double* errors = ErrorsOf(turn_, side);
    unsigned long long seen[kMost];
    for (bool there = false; !there;) {
      there = true;
#pragma unroll
      for (int k = 0; k < kMost; ++k) seen[k] = LoadOneTagged(errors + min(32 * k + Lane(), blocks_ - 1));
#pragma unroll
      for (int k = 0; k < kMost; ++k) there = there && ((seen[k] ^ ErrorTag(turn_)) & 1) == 0;
    }
    double sum = 0;
#pragma unroll
    for (int k = 0; k < kMost; ++k) sum += 32 * k + Lane() < blocks_ ? __longlong_as_double(seen[k]) : 0;
#pragma unroll
    for (int mask = 16; mask > 0; mask /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, mask);
    return sum;
  }

  // ---- The end ------------------------------------------------------------------------------------------------------

  __device__ void Store() const {
    const int parity = m_.state().parity;
    for (int side = 0; side < 2; ++side) {
      const OwnPoints& own = side == 0 || kSelf ? m_.rows : m_.columns;
      double* phi = member_.phi(engine_, parity, side) + own.first;
      for (int k = threadIdx.x; k < own.count; k += kSymmetricThreads) phi[k] = own.phi[parity][k];
    }
  }
  // From what all sum up to at the potentials that have been stored.
  __device__ void Measure() {
    meeting_.Arrive();
    meeting_.Await();
    const double scale = ScaleOf(m_.state().epsilon), first = __ldcg(member_.phi(engine_, m_.state().parity, 1));
    for (int side = 0; side < 2; ++side) {
      const OwnPoints& own = side == 0 || kSelf ? m_.rows : m_.columns;
      const int measure = MeasureOf(engine_, side);
      BlockStats all = NoStats();
      for (int k = threadIdx.x; k < own.count; k += kSymmetricThreads) {
        const int i = own.first + k;
        const double phi = own.phi[m_.state().parity][k];
        // As it was when that was added up.
        const float exact = TermOf(side, phi, scale);
        const float term = IsSeen(side) ? __uint_as_float(Tagged(exact, (turn_ - 1) & 1)) : exact;
        const double lse = log2(static_cast<double>(own.sum[k])) - term + ReferenceOf(side) * scale;
        const MeasuredPoint point = {phi,
                                     member_.Shift(engine_, side, i),
                                     member_.mass(measure)[i],
                                     member_.log_mass(measure)[i],
                                     side == 0 ? first : -first,
                                     m_.state().cut_short != 0};
        BlockStats stats = NoStats();
        member_.ratio(engine_, side)[i] = MeasurePoint(point, RhoOf(member_.job, engine_, side), lse, scale, &stats);
        all = Combine(all, stats);
      }
      StoreStats(all, true, member_.stats(engine_, side) + rank_);
    }
  }
  __device__ void End(bool measured) {
    const bool is_last = measured ? LastToArrive(meeting_.Other(), blocks_) : rank_ == 0;
    if (is_last && threadIdx.x == 0) {
      EngineState* state = member_.state(engine_);
      *state = m_.state();
      if (m_.lost && !m_.state().stopped) Fall(member_.job, state);
    }
    if (is_last && measured) EndPlainMeasure(member_, engine_, blocks_, m_.scratch);
    if (threadIdx.x == 0) meeting_.Leave();
  }

  const Member& member_;
  SymmetricMemory& m_;
  const int engine_, rank_, blocks_;
  HeldMeeting meeting_;
  int turn_ = 0;
};

#endif

// Groups of `group` blocks, each of which solves one problem after the other: engines of the mask, of each member.
template <int kDims, bool kSelf>
__global__ void __launch_bounds__(kSymmetricThreads, 1)
    SymmetricKernel(LaunchTable table, int64_t problems, int group, unsigned engines, int most) {
#if SINKHORN_HOPPER
  __shared__ SymmetricMemory memory;
  const int groups = gridDim.x / group, each = __popc(engines), first = __ffs(engines) - 1;
  for (int64_t problem = blockIdx.x / group; problem < problems; problem += groups) {
    const BlockWork work = FindWork(table, problem);
    const Job& job = CopyJob(table.jobs[work.job]);
    const Member member{job, job.turn_first + work.block / each};
    const int engine = first + static_cast<int>(work.block % each), rank = blockIdx.x % group;
    const EngineState& state = *member.state(engine);
    if (IsApart(job, engine, state) && !state.stopped && rank < SymmetricShapeOf(job, engine).blocks) {
      SymmetricLoop<kDims, kSelf>(member, engine, rank, &memory).Run(most);
    }
    __syncthreads();  // What it had of this problem has been read.
  }
#endif
}

constexpr int kSymmetricBytes = 128 * 1024;  // Of shared memory, for as many rows as a block has at most.

}  // namespace

SymmetricLaunch SymmetricLaunchOf(const Job& job, unsigned engines, int iterations) {
  return {job.dim > 2 ? 3 : 2, SymmetricShapeOf(job, engines == kCrossEngine ? 0 : 1).group, iterations, engines};
}

int64_t SymmetricProblems(const Job& job, const SymmetricLaunch& of) {
  return job.turn_members * (of.engines == kCrossEngine ? 1 : 2);
}

void LaunchSymmetric(const LaunchTable& table, int64_t problems, const SymmetricLaunch& of, cudaStream_t stream) {
  if (problems == 0) return;
  const auto launch = [&](auto kernel) {
    const int64_t groups = std::min<int64_t>(problems, kProcessors / of.group);
    AttributedLaunch attributed(kernel, groups * of.group, kSymmetricThreads, kSymmetricBytes, stream);
    attributed.Add(Together());
    attributed.Enqueue(kernel, table, problems, of.group, of.engines, of.iterations);
  };
  if (of.engines == kCrossEngine) return launch(of.dims == 3 ? SymmetricKernel<3, false> : SymmetricKernel<2, false>);
  launch(of.dims == 3 ? SymmetricKernel<3, true> : SymmetricKernel<2, true>);
}

}  // namespace cuda
}  // namespace sinkhorn
