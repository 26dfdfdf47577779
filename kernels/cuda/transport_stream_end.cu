// Columns of problems that are streamed: their terms where sweeps begin, and, after each, what the slabs' sums make of
// them (Hopper).
#include "kernels/cuda/transport_stream.cuh"

namespace sinkhorn {
namespace cuda {
namespace {

// Where streaming begins, or goes on with columns' potentials that it has not made: their terms.
__global__ void __launch_bounds__(kThreads) StreamTermsKernel(LaunchTable table) {
#if SINKHORN_HOPPER
  AllowNextKernel();
  const BlockWork work = FindWork(table, blockIdx.x);
  const Job& job = CopyJob(table.jobs[work.job]);
  const EnginePart part = FindEnginePart<StreamTermBlocks>(job, AllEngines(job), work.block);
  const Member member{job, part.member};
  const EngineState& state = *member.state(part.engine);
  const int j = static_cast<int>(part.block) * kThreads + threadIdx.x;
  if (IsStreamed(job, state) && j < StreamColumns(job, part.engine)) StoreTerm(member, part.engine, state, j);
#endif
}

#if SINKHORN_HOPPER

constexpr int kEndWarps = kThreads / 32, kEndParts = kThreads / kEndColumns;
static_assert(kEndColumns == 64, "a lane for two columns");

// log2 of a column's sum over the rows, at these potentials, seen from the column's base: read again, in double, under
// its maximum. All threads call it, for the block's columns.
template <typename T>
__device__ double LogSumOfColumn(const Member& member, int engine, const StreamFrame& frame, const double* row_phi,
                                 int j) {
  __shared__ double maxima[kEndParts][kEndColumns], sums[kEndParts][kEndColumns];
  const Job& job = member.job;
  const int part = threadIdx.x / kEndColumns, column = threadIdx.x % kEndColumns;
  const T* numbers = NumbersOf<T>(member, engine) + j;
  const int rows = EngineSize(job, engine, 0);
  const double* log_mass = member.log_mass(MeasureOf(engine, 0));
  const double factor = AreCosts(member) ? -frame.scale : 1;
  const auto exponent = [&](int i) {
    const double number = LoadNumber(numbers + int64_t{i} * StreamColumns(job, engine));
    return number * factor + frame.RowTerm(row_phi[i], BaseOf(member, engine, 0, i)) + log_mass[i];
  };
  double max = kVoid, sum = 0;
  for (int i = part; i < rows; i += kEndParts) max = fmax(max, exponent(i));
  for (int i = part; i < rows; i += kEndParts) sum += exp2(exponent(i) - max);
  maxima[part][column] = max;
  sums[part][column] = sum;
  __syncthreads();
  for (int k = 0; k < kEndParts; ++k) max = fmax(max, maxima[k][column]);
  sum = 0;
  for (int k = 0; k < kEndParts; ++k) sum += sums[k][column] * exp2(maxima[k][column] - max);
  return max + log2(sum);
}

#endif

// Columns: the slabs' sums, and what follows for the engine.
__global__ void __launch_bounds__(kThreads, 2) StreamEndKernel(LaunchTable table, Pass pass) {
#if SINKHORN_HOPPER
  __shared__ double parts[kEndWarps][kEndColumns];
  const BlockWork work = FindWork(table, blockIdx.x);
  const Job& job = CopyJob(table.jobs[work.job]);
  const EnginePart part = FindEnginePart<StreamEnds>(job, AllEngines(job), work.block);
  const int engine = part.engine, blocks = StreamEnds(job, engine), slabs = StreamSlabs(job, engine);
  const int measure = MeasureOf(engine, 1), size = job.size[measure];
  const Member member{job, part.member};
  const RowBlock block = {member.index, engine, static_cast<int>(part.block), 0, 1};
  const int first = block.block * kEndColumns, of_block = threadIdx.x % kEndColumns, column = first + of_block;
  const int j = min(column, size - 1);
  const bool there = column < size, iterates = pass == Pass::kIterate, symmetric = IsSymmetric(job, engine);
  const bool judged = !iterates || job.solver.tolerance > 0;
  if (IsIdleAlready(member, engine, pass)) return;
  AwaitKernelBefore();
  // 1. Sums over the slabs. All that is read is on its way at once, of both parities.
  EngineState* state = member.state(engine);
  const int warp = threadIdx.x / 32, pair = 2 * (threadIdx.x % 32);
  const int stride = StreamColumns(job, engine);
  const float* partial = member.At<float>(job.at.stream_sums[engine]) + min(first + pair, stride - 2);
  double sums[2] = {0, 0};
#pragma unroll 16
  for (int k = warp; k < slabs; k += kEndWarps) {
    const float2 both = *reinterpret_cast<const float2*>(partial + int64_t{k} * stride);
    sums[0] += both.x;
    sums[1] += both.y;
  }
  const double phi_of[2] = {member.phi(engine, 0, 1)[j], member.phi(engine, 1, 1)[j]};
  const double base = BaseOf(member, engine, 1, j), log_mass = member.log_mass(measure)[j];
  RowStep row = {0, member.Shift(engine, 1, j), member.mass(measure)[j], state->epsilon, state->relax, state->parity};
  const bool idle = !IsStreamed(job, *state) || IsIdle(job, *state, pass);
  const StreamFrame frame = StreamFrameOf(member, *state);
  const double least = kLeastShare * state->total_mass[0];
  row.phi = row.parity == 0 ? phi_of[0] : phi_of[1];
  AllowNextKernel();  // Its copies come behind what was read here: they would hold that up.
  if (idle) return;
  parts[warp][pair] = sums[0];
  parts[warp][pair + 1] = sums[1];
  unsigned* arrivals = member.At<unsigned>(job.at.arrivals) + (engine + 1) * job.at.arrival_stride - 1;
  __syncthreads();
  // The state moves on when all have read it, if residuals decide nothing: by a thread that no column waits for.
  if (!judged && threadIdx.x + 1 == kThreads && CountArrival(arrivals, blocks)) MoveState(member, engine);
  double sum = 0;
  for (int k = 0; k < kEndWarps; ++k) sum += parts[k][of_block];
  // 2. Their logarithms. Columns without mass, which no row sees, get their potentials when all is measured, unless
  // those are averages over all iterations.
  const bool is_void = log_mass <= kVoid, waits = is_void && !symmetric;
  const float term = frame.ColumnTerm(row.phi, base, log_mass);
  const double scale = frame.scale, seen = -(frame.reference + base) * scale;
  double lse = log2(sum) - term + seen;
  const bool again = there && (waits ? !iterates : is_void || !(sum > least && sum < INFINITY));
  if (__syncthreads_or(again)) {
    const double* row_phi = member.phi(engine, iterates && !symmetric ? row.parity ^ 1 : row.parity, 0);
    const double whole = KeepsHalves(job) ? LogSumOfColumn<__half>(member, engine, frame, row_phi, j)
                                          : LogSumOfColumn<float>(member, engine, frame, row_phi, j);
    if (again) lse = whole + seen;
  }
  // 3. What becomes of the columns.
  BlockStats stats = NoStats();
  if (there && threadIdx.x < kEndColumns) {
    if (iterates && waits) {
      member.phi(engine, row.parity ^ 1, 1)[j] = row.phi;
    } else if (iterates) {
      IterateRow(member, block, 1, j, row, lse, scale, judged, &stats);
      const double phi = member.phi(engine, row.parity ^ 1, 1)[j];
      member.At<float>(job.at.stream_terms[engine])[j] = frame.ColumnTerm(phi, base, log_mass);
    } else {
      const double reference_phi = member.phi(engine, row.parity, 1)[0], rho = RhoOf(job, engine, 1);
      MeasuredPoint point = {row.phi, row.shift, row.mass, log_mass, -reference_phi, state->cut_short != 0};
      if (waits) {
        point.phi = HalfStep(row.phi, lse, scale, row.shift, row.epsilon, rho, 1);
        // All others may still read what the first column had.
        member.phi(engine, j == 0 ? row.parity ^ 1 : row.parity, 1)[j] = point.phi;
      }
      member.ratio(engine, 1)[j] = MeasurePoint(point, rho, lse, scale, &stats);
    }
  }
  if (!judged) return;
  StoreStats(stats, pass == Pass::kMeasure, member.stats(engine, 1) + block.block);
  if (!LastToArrive(arrivals, blocks)) return;
  EndPass(member, block, 0, pass, slabs);
  __syncthreads();
  if (iterates && state->stopped) return;  // The potentials before were the answer.
  EndPass(member, block, 1, pass, blocks);
  if (iterates || symmetric || threadIdx.x != 0 || member.log_mass(measure)[0] > kVoid) return;
  *member.phi(engine, row.parity, 1) = __ldcg(member.phi(engine, row.parity ^ 1, 1));
#endif
}

}  // namespace

int64_t StreamTermsBlocks(const Job& job) { return job.count * BlocksOf<StreamTermBlocks>(job, AllEngines(job)); }
int64_t StreamEndBlocks(const Job& job) { return job.count * BlocksOf<StreamEnds>(job, AllEngines(job)); }

void LaunchStreamTerms(const LaunchTable& table, int64_t blocks, cudaStream_t stream) {
  LaunchKernel(StreamTermsKernel, blocks, kThreads, 0, stream, table);
}
void LaunchStreamEnd(const LaunchTable& table, int64_t blocks, Pass pass, cudaStream_t stream) {
  // The sweep's share of shared memory: multiprocessors that change it stand still first.
  RaiseAttribute(StreamEndKernel, cudaFuncAttributePreferredSharedMemoryCarveout, cudaSharedmemCarveoutMaxShared);
  LaunchOverlapping(StreamEndKernel, blocks, kThreads, 0, stream, table, pass);
}

}  // namespace cuda
}  // namespace sinkhorn
