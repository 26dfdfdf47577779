// What a slice enqueues, stage by stage: residents are prepared, iterate, two passes an iteration, and end.
#include "kernels/cuda/transport_slice.h"

#include <algorithm>
#include <tuple>
#include <utility>
#include <vector>

#include "kernels/cuda/transport_launch.h"
#include "kernels/cuda/transport_outputs.h"
#include "kernels/cuda/transport_resident.h"
#include "kernels/cuda/transport_symmetric.cuh"

namespace sinkhorn {
namespace cuda {
namespace {

class Slice : private OutputLaunches {
 public:
  Slice(absl::Span<Resident* const> residents, double slice_seconds, LaunchContext* context)
      : OutputLaunches(residents, slice_seconds, context) {}

  absl::Status Run() {
    const Set preparing = Select([](const TransportResident& r) { return r.stage() == Stage::kPrepare; });
    Prepare(preparing);
    // Small problems may be through at once.
    const Set hopeful = Among(preparing, [&](const TransportResident& r) {
      const Job& job = r.job();
      if (job.held) return HoldsAll(job);
      if (TakesTurns(job)) return false;
      const bool judged = job.solver.tolerance > 0;
      if (judged && job.looped) return LoopChunk(job) * IterationSeconds(job) < slice_seconds();
      const bool apart = job.loops_symmetric && (job.symmetric || job.looped_beside);
      if (judged && apart) return TogetherSeconds(job) < slice_seconds();
      return (r.OnChip() || !judged) && job.solver.max_iterations * IterationSeconds(job) < slice_seconds();
    });
    const Set holding = Select([](const TransportResident& r) { return r.stage() == Stage::kHold; });
    RunHopeful(hopeful);
    HoldOn(holding);
    Iterate();
    Set finishing = Select([](const TransportResident& r) { return r.stage() == Stage::kFinish; });
    for (const Set* held : {&hopeful, &holding}) {
      for (int k : *held) {
        if (!residents()[k]->HoldsOn()) finishing.push_back(k);
      }
    }
    std::sort(finishing.begin(), finishing.end());
    Finish(finishing);
    End(preparing, finishing);
    return Enqueue();
  }

 private:
  static int64_t Points(const Job& job) { return int64_t{job.size[0]} + job.size[1]; }
  // Members that are solved on the chip, if there are many: each by a block, in one launch. All others step by step,
  // for which a member has as many blocks as are of use.
  void Prepare(const Set& set) {
    const auto kinds = ByKind<bool>(set, [](const TransportResident& r, auto add) { add(IsSquared(r.job())); });
    for (const auto& [squares, chosen] : kinds) {
      const Set small = Among(chosen, [](const TransportResident& r) { return MayPrepareAll(r.job()); });
      int64_t members = 0;
      for (int k : small) members += residents()[k]->job().count;
      if (members < kProcessors) {
        PrepareByStep(chosen, squares);
        continue;
      }
      Later(TableOf(small, [](const Job& job) { return job.count; }),
            [this, squares = squares](const LaunchTable& t, int64_t blocks) {
              LaunchPrepareAll(t, blocks, squares, stream());
            });
      PrepareByStep(Among(chosen, [](const TransportResident& r) { return !MayPrepareAll(r.job()); }), squares);
    }
  }
  void PrepareByStep(const Set& set, bool squares) {
    int64_t all = 0;
    for (int k : set) all += residents()[k]->job().count * Points(residents()[k]->job());
    const int points = PreparedPoints(all);
    for (int step = squares ? kRangesStep : 0; step < kPrepareSteps; ++step) {
      Later(TableOf(set, [=](const Job& job) { return job.count * PrepareBlocks(job, step, points); }),
            [=](const LaunchTable& t, int64_t blocks) { LaunchPrepare(t, blocks, squares, step, points, stream()); });
    }
  }

  // Whole solves, on the guess that float32 will do; of those that are held, or looped until a tolerance is met, as
  // many iterations as that takes at once.
  void RunHopeful(const Set& set) {
    int most = 0;
    for (int k : set) {
      residents()[k]->Hope();
      if (residents()[k]->OnChip()) most = std::max(most, residents()[k]->job().solver.max_iterations);
    }
    RunOnChip(set, most);
    Set passing = Among(set, [](const TransportResident& r) { return !r.OnChip(); });
    int64_t iterations = 0;
    for (int k : passing) iterations = std::max<int64_t>(iterations, residents()[k]->job().solver.max_iterations);
    Passes passes;
    bool changed = true;  // The set, or what its problems are solved from.
    for (int64_t done = 0; !passing.empty(); ++done) {
      changed |= KeepAll(passing, done);
      changed |= Hold(&passing, done);
      changed |= LoopApart(&passing, done, iterations, true);
      changed |= LoopBeside(&passing, done, iterations, true);
      for (int k : Loop(&passing, done, iterations, true)) {
        const Job& job = residents()[k]->job();
        if (job.solver.tolerance > 0) residents()[k]->CountPasses(done + LoopChunk(job));
        changed = true;
      }
      if (changed) passes = PassesOf(passing);
      RunPass(&passes, Pass::kIterate, done);
      const Set left = Among(passing, [done](const TransportResident& r) { return r.passes_left() > done + 1; });
      changed = left.size() != passing.size();
      passing = left;
    }
  }

  // Those that may leave the set, their iterations enqueued: launch(table, problems, kind_of(job)). Returns them.
  template <typename May, typename KindOf, typename Launch>
  Set TakeTogether(Set* set, May may, KindOf kind_of, Launch launch) {
    const Set taken = Among(*set, may);
    Together(taken, kind_of, launch);
    if (!taken.empty()) *set = Among(*set, [may](const TransportResident& r) { return !may(r); });
    return taken;
  }
  // launch(table, problems, kind) for each kind there is.
  template <typename KindOf, typename Launch>
  void Together(const Set& set, KindOf kind_of, Launch launch) {
    using Kind = decltype(kind_of(std::declval<const Job&>()));
    const auto kinds = ByKind<Kind>(set, [kind_of](const TransportResident& r, auto add) { add(kind_of(r.job())); });
    for (const auto& [kind, chosen] : kinds) {
      const Table table = TableOf(chosen, [](const Job& job) { return job.turn_members; });
      Later(table, [=, kind = kind](const LaunchTable& t, int64_t problems) { launch(t, problems, kind); });
    }
  }
  auto Holding() {
    return
        [this](const LaunchTable& t, int64_t problems, const HeldLaunch& of) { LaunchHeld(t, problems, of, stream()); };
  }
  // Those that are held from now on; whether there are any.
  bool Hold(Set* set, int64_t done) {
    const Set holding = TakeTogether(
        set, [done](const TransportResident& r) { return r.MayHold(done); }, HeldLaunchOf, Holding());
    HoldSelves(holding, [](const TransportResident& r) { return SelfLaunchesOf(r.job()); });
    for (int k : holding) residents()[k]->Hold();
    return !holding.empty();
  }
  // Engines 1 and 2 of those that are held, in the launches that a resident takes.
  template <typename LaunchesOf>
  void HoldSelves(const Set& set, LaunchesOf launches_of) {
    const Set debiased = Among(set, [](const TransportResident& r) { return HoldsSelves(r.job()); });
    const auto launches = ByKind<SelfLaunch>(debiased, [=](const TransportResident& r, auto add) {
      for (const SelfLaunch& launch : launches_of(r)) add(launch);
    });
    for (const auto& [launch, chosen] : launches) {
      Later(TableOf(chosen, [launch = launch](const Job& job) { return SelfProblems(job, launch); }),
            [this, launch = launch](const LaunchTable& t, int64_t problems) {
              LaunchSelf(t, problems, launch, stream());
            });
    }
  }
  // The same of those some of whose members are.
  void HoldOn(const Set& set) {
    for (int k : set) residents()[k]->Hope();
    Together(set, HeldLaunchOf, Holding());
    HoldSelves(set, [](const TransportResident& r) { return SelfLaunchesOf(r.job()); });
    for (int k : set) residents()[k]->Hold();
  }
  // The same of engines 0 alone, whose jobs stay for the others once no member is left.
  bool HoldBeside(Set* set) {
    const Set holding = Among(*set, [](const TransportResident& r) { return r.MayHoldBeside(); });
    Together(holding, HeldLaunchOf, Holding());
    for (int k : holding) residents()[k]->HoldBeside();
    if (!holding.empty()) *set = Among(*set, [](const TransportResident& r) { return !r.MayHoldBeside(); });
    return !holding.empty();
  }
  // Whether this slice serves some of the members.
  static bool TakesTurns(const Job& job) { return job.turn_members < job.count; }
  // About `most` iterations, by launches of `chunk`; `all`: not less, unless a tolerance may be met before.
  static int64_t LaunchesOf(const Job& job, int chunk, int64_t most, bool all) {
    if (TakesTurns(job) || (all && job.solver.tolerance > 0)) return 1;
    return all ? CeilDiv(most, chunk) : std::max<int64_t>(1, most / chunk);
  }
  static int64_t LoopLaunches(const Job& job, int64_t most, bool all) {
    return LaunchesOf(job, LoopChunk(job), most, all);
  }
  // Those that are looped: LoopLaunches of each.
  Set Loop(Set* set, int64_t done, int64_t most, bool all) {
    Set looping;
    const auto take = [&](bool clouds, auto launch_of, auto launch) {
      const Set taken = TakeTogether(
          set, [=](const TransportResident& r) { return r.MayLoop(done) && LoopsClouds(r.job()) == clouds; },
          [=](const Job& job) { return std::make_tuple(launch_of(job), LoopChunk(job), LoopLaunches(job, most, all)); },
          [=](const LaunchTable& t, int64_t problems, const auto& of) {
            const auto& [kind, chunk, launches] = of;
            for (int64_t k = launches; k > 0; --k) launch(t, problems, kind, chunk, stream());
          });
      looping.insert(looping.end(), taken.begin(), taken.end());
    };
    take(false, LoopLaunchOf, LaunchLoop);
    take(true, CloudLoopLaunchOf, LaunchCloudLoop);
    for (int k : looping) residents()[k]->Loop();
    return looping;
  }

  // Engines that are apart, of those that may. Jobs with nothing else to do leave the set; whether there are any.
  bool LoopApart(Set* set, int64_t done, int64_t most, bool all) {
    const Set looping = Among(*set, [done](const TransportResident& r) { return r.MayLoopApart(done); });
    using Kind = std::pair<SymmetricLaunch, int64_t>;
    const auto kinds = ByKind<Kind>(looping, [=](const TransportResident& r, auto add) {
      const Job& job = r.job();
      const int chunk = SymmetricChunk(job);
      const int64_t wanted = std::min<int64_t>(most, job.solver.max_iterations) + 1;  // From cold.
      const int64_t launches = LaunchesOf(job, chunk, wanted, all);
      if (job.engines > 1) add({SymmetricLaunchOf(job, kSelfEngines, chunk), launches});
      if (job.symmetric) add({SymmetricLaunchOf(job, kCrossEngine, chunk), launches});
    });
    for (const auto& [kind, chosen] : kinds) {
      Later(TableOf(chosen, [launch = kind.first](const Job& job) { return SymmetricProblems(job, launch); }),
            [this, kind = kind](const LaunchTable& t, int64_t problems) {
              for (int64_t k = kind.second; k > 0; --k) LaunchSymmetric(t, problems, kind.first, stream());
            });
    }
    for (int k : looping) residents()[k]->LoopApart();
    const auto leaves = [](const TransportResident& r) {
      return r.LoopsApart() && (r.job().symmetric || TakesTurns(r.job()) || !r.LeavesOthers());
    };
    const size_t before = set->size();
    *set = Among(*set, [=](const TransportResident& r) { return !leaves(r); });
    return set->size() != before;
  }

  // Engines 0 of those whose other engines wait for them, or have launches of their own. As Loop.
  bool LoopBeside(Set* set, int64_t done, int64_t most, bool all) {
    const auto may = [done](const TransportResident& r) { return r.MayLoopBeside(done); };
    const auto kind_of = [=](const Job& job) {
      return std::make_tuple(LoopLaunchOf(job), LoopChunk(job), LoopLaunches(job, most, all));
    };
    const Set looping = TakeTogether(set, may, kind_of, [=](const LaunchTable& t, int64_t problems, const auto& of) {
      const auto& [kind, chunk, launches] = of;
      for (int64_t k = launches; k > 0; --k) LaunchLoop(t, problems, kind, chunk, stream());
    });
    for (int k : looping) residents()[k]->LoopBeside();
    return !looping.empty();
  }

  // Two launches, one for each side, for every kernel in use.
  struct PassTables {
    Source source;
    Mode mode;
    Geometry geometry;
    int planes;  // Of clouds in float32.
    int dim;     // The largest.
    bool hopper;
    bool keeps_first;  // Densities, if it is a columns' half step.
    Table side[2];
  };
  struct StreamTables {
    StreamLaunch launch;
    Table slabs;
  };
  struct Passes {
    Set streaming, keeping_first;
    std::vector<StreamTables> streams;
    Table stream_terms, stream_end;
    bool has_terms = false, anneal = false;  // Terms that sweeps leave are for the epsilon before.
    std::vector<PassTables> others;
  };
  // Jobs of a source and a mode that one kernel serves.
  static int KindOf(const Job& job, Mode mode) {
    if (mode == kMixed) return MultipliesDoubles(job) ? 1 + (job.dim <= kFewDims) : 0;
    if (mode == kDouble || !job.halves) return 0;  // Distances, which have two planes.
    return PlanesOf(job) - 1 + 2 * static_cast<int>(PartsOf(PlanesOf(job), job.dim));
  }
  Passes PassesOf(const Set& set) {
    Passes passes;
    passes.others = TablesOf(set);
    passes.keeping_first = Among(set, [](const TransportResident& r) { return r.MayKeepFirst(); });
    passes.streaming = Among(set, [](const TransportResident& r) {
      return (r.Streams() && r.Has(kFloat)) || (r.StreamsFrames() && r.Has(kMixed));
    });
    const auto launches = ByKind<StreamLaunch>(passes.streaming, [](const TransportResident& r, auto add) {
      for (const StreamLaunch& launch : StreamLaunchesOf(r.job())) add(launch);
    });
    for (const auto& [launch, chosen] : launches) {
      const Table slabs = TableOf(chosen, [launch = launch](const Job& job) { return StreamBlocks(job, launch); });
      passes.streams.push_back({launch, slabs});
    }
    const Set without_terms = Among(passes.streaming, [](const TransportResident& r) { return !r.HasTerms(); });
    passes.stream_terms = TableOf(without_terms, [](const Job& job) { return StreamTermsBlocks(job); });
    passes.anneal = !Among(passes.streaming, [](const TransportResident& r) { return r.Anneals(); }).empty();
    passes.stream_end = TableOf(passes.streaming, [](const Job& job) { return StreamEndBlocks(job); });
    return passes;
  }
  // kMixed before kFloat: an engine whose epsilon becomes too small for that has ended its iteration there.
  std::vector<PassTables> TablesOf(const Set& set) {
    using Kind = std::tuple<Source, Mode, int, bool>;
    const auto kinds = ByKind<Kind>(set, [](const TransportResident& r, auto add) {
      const Source source = SourceOf(r.job());
      AddModes(r, [&](Mode mode) {
        if (r.OnChip(mode) || (mode == kFloat ? r.Streams() : r.StreamsFrames())) return;
        const bool keeps_first = mode == kFloat && r.MayKeepFirst();
        add({source, mode, source != Source::kCosts ? KindOf(r.job(), mode) : 0, keeps_first});
      });
    });
    std::vector<PassTables> tables;
    for (const auto& [kind, chosen] : kinds) {
      const auto [source, mode, unused, keeps_first] = kind;
      const Job& first = residents()[chosen[0]]->job();
      PassTables pass{source,      mode, GeometryOf(first, mode), PlanesOf(first), LargestDim(chosen), first.hopper,
                      keeps_first, {}};
      for (int side = 0; side < 2; ++side) {
        pass.side[side] = TableOf(chosen, [side, mode = mode](const Job& job) {
          return job.count * PassBlocks(job, side, GeometryOf(job, mode));
        });
      }
      tables.push_back(pass);
    }
    std::stable_sort(tables.begin(), tables.end(),
                     [](const PassTables& p, const PassTables& q) { return p.mode > q.mode; });
    return tables;
  }
  // `number`: of the iteration in this slice.
  void RunPass(Passes* passes, Pass pass, int64_t number) {
    if (!passes->has_terms) {
      Later(passes->stream_terms,
            [this](const LaunchTable& table, int64_t blocks) { LaunchStreamTerms(table, blocks, stream()); });
      passes->has_terms = !passes->anneal;
    }
    for (const StreamTables& t : passes->streams) {
      Later(t.slabs, [=, launch = t.launch](const LaunchTable& table, int64_t blocks) {
        LaunchStream(table, blocks, launch, pass, number % 2 == 1, stream());
      });
    }
    Later(passes->stream_end,
          [this, pass](const LaunchTable& table, int64_t blocks) { LaunchStreamEnd(table, blocks, pass, stream()); });
    for (int k : passes->streaming) residents()[k]->Sweep();
    for (int k : passes->keeping_first) residents()[k]->KeepFirst();
    for (int side = 0; side < 2; ++side) {
      for (const PassTables& tables_of : passes->others) {
        Later(tables_of.side[side], [this, t = tables_of, side, pass](const LaunchTable& table, int64_t blocks) {
          if (t.geometry == Geometry::kExact) {
            LaunchExactStep(table, blocks, t.dim, side, pass, stream());
          } else if (t.geometry == Geometry::kCloud && t.source == Source::kDistances) {
            LaunchCloudDistances(table, blocks, t.dim, t.hopper, side, pass, stream());
          } else if (t.keeps_first && side == 1 && pass == Pass::kIterate) {
            LaunchFirstColumns(table, blocks, t.dim, stream());
          } else if (t.geometry == Geometry::kCloud) {
            LaunchCloudStep(table, blocks, t.planes, t.dim, t.hopper, side, pass, stream());
          } else {
            LaunchHalfStep(table, blocks, t.source, t.mode, side, pass, 0, stream());
          }
        });
      }
    }
  }

  // Exponents of clouds that have done their first iteration, with frames of others; whether there are any. `done`: see
  // MayKeepExponents.
  bool KeepAll(const Set& set, int64_t done) {
    const bool kept = KeepExponents(set, done);
    return RenewFrames(set) || kept;
  }
  bool KeepExponents(const Set& set, int64_t done) {
    const Set keeping =
        Among(set, [done](const TransportResident& r) { return r.MayKeepExponents(done) && r.Has(kFloat); });
    using Kind = std::tuple<Source, int, bool, Parts>;
    const auto kinds = ByKind<Kind>(keeping, [](const TransportResident& r, auto add) {
      const int planes = PlanesOf(r.job());
      add({SourceOf(r.job()), planes, KeepsDensities(r.job()), PartsOf(planes, r.job().dim)});
    });
    for (const auto& [kind, chosen] : kinds) {
      const int dim = LargestDim(chosen);
      const Table table =
          TableOf(chosen, [](const Job& job) { return job.count * PassBlocks(job, 0, Geometry::kCloud); });
      Later(table, [=, kind = kind](const LaunchTable& t, int64_t blocks) {
        const auto [source, planes, densities, parts] = kind;
        LaunchExponents(t, blocks, source, planes, densities, dim, stream());
      });
    }
    for (int k : keeping) residents()[k]->KeepExponents();
    return !keeping.empty();
  }
  // Of those that have frames, iterations that are held. Those some of whose members are left for other slices leave
  // the set. Returns the seconds that it takes.
  double HoldFrames(Set* set) {
    const Set holding = Among(*set, [](const TransportResident& r) { return r.FramesToHold() > 0; });
    const auto launches = ByKind<HeldLaunch>(
        holding, [](const TransportResident& r, auto add) { add(FramedLaunchOf(r.job(), r.FramesToHold())); });
    for (const auto& [launch, chosen] : launches) {
      Later(TableOf(chosen, [](const Job& job) { return job.turn_members; }),
            [this, launch = launch](const LaunchTable& t, int64_t problems) {
              LaunchHeld(t, problems, launch, stream());
            });
    }
    HoldSelves(holding, [](const TransportResident& r) { return FramedSelfLaunchesOf(r.job(), r.FramesToHold()); });
    double seconds = 0;
    Set left;
    for (int k : *set) {
      TransportResident* r = residents()[k];
      const int count = r->FramesToHold();
      if (count > 0) seconds += count * HeldIterationSeconds(r->job(), r->job().turn_members);
      if (count == 0 || r->HoldFrames()) left.push_back(k);
    }
    *set = left;
    return seconds;
  }
  bool RenewFrames(const Set& set) {
    const Set framing = Among(set, [](const TransportResident& r) { return r.WantsFrames(); });
    using Kind = std::tuple<Source, int, bool>;
    const auto kinds = ByKind<Kind>(framing, [](const TransportResident& r, auto add) {
      add({SourceOf(r.job()), FrameDim(r.job()), !r.StreamsFrames()});
    });
    for (const auto& [kind, chosen] : kinds) {
      const Table table =
          TableOf(chosen, [](const Job& job) { return job.count * BlocksOf<FrameBlocks>(job, AllEngines(job)); });
      Later(table, [this, kind = kind](const LaunchTable& t, int64_t blocks) {
        const auto [source, dim, first] = kind;
        LaunchFrames(t, blocks, source, dim, first, stream());
      });
    }
    for (int k : framing) residents()[k]->RenewFrames();
    return !framing.empty();
  }

  Table AcceleratedOf(const Set& set) {
    const Set chosen = Among(set, [](const TransportResident& r) { return IsAccelerated(r.job()) && !r.job().looped; });
    return TableOf(chosen, AndersonBlocks);
  }

  // Exponents in float64 of those that are solved from them on the chip, once.
  void MakeExact(const Set& set) {
    const Set making = Among(set, [](const TransportResident& r) { return r.LacksExact(); });
    const auto sources = ByKind<Source>(making, [](const TransportResident& r, auto add) { add(SourceOf(r.job())); });
    for (const auto& [source, chosen] : sources) {
      const Table table =
          TableOf(chosen, [](const Job& job) { return job.count * BlocksOf<ExactBlocks>(job, AllEngines(job)); });
      Later(table, [this, source = source](const LaunchTable& t, int64_t blocks) {
        LaunchExact(t, blocks, source, stream());
      });
    }
    for (int k : making) residents()[k]->MakeExact();
  }

  void RunOnChip(const Set& set, int64_t iterations) {
    const int chunks = static_cast<int>(CeilDiv(iterations, kOnChipChunk));
    const auto launches = ByKind<OnChipLaunch>(set, [](const TransportResident& r, auto add) {
      for (OnChipLaunch launch : OnChipLaunchesOf(r.job())) {
        if (r.Has(kFloat)) add(launch);
        launch.source = Source::kExact;
        if (r.Has(kMixed) && r.OnChip(kMixed)) add(launch);
      }
    });
    // Wide clusters on a stream of their own, so that others are solved on the processors that they leave.
    const auto is_wide = [](const auto& launch) { return launch.first.IsWide(); };
    const bool beside = std::any_of(launches.begin(), launches.end(), is_wide) &&
                        !std::all_of(launches.begin(), launches.end(), is_wide);
    if (beside) Later([this] { context()->Fork(); });
    for (const auto& [launch, chosen] : launches) {
      const bool wide = launch.IsWide();
      const Table table = TableOf(wide ? WidestFirst(chosen) : chosen,
                                  [launch = launch](const Job& job) { return OnChipBlocks(job, launch); });
      Later(table, [=, launch = launch](const LaunchTable& t, int64_t blocks) {
        LaunchOnChip(t, blocks, launch, chunks, beside && wide ? context()->side_stream() : stream());
      });
    }
    if (beside) Later([this] { context()->Join(); });
  }
  // By the blocks that problems take on the chip.
  Set WidestFirst(const Set& set) const {
    std::vector<std::pair<int, int>> by_ranks;
    for (int k : set) by_ranks.push_back({-OnChipShapeOf(residents()[k]->job(), 0).ranks, k});
    std::sort(by_ranks.begin(), by_ranks.end());
    Set ordered;
    for (const auto& [ranks, k] : by_ranks) ordered.push_back(k);
    return ordered;
  }

  void Iterate() {
    Set set = Select([](const TransportResident& r) { return r.stage() == Stage::kIterate; });
    if (set.empty()) return;
    double seconds = 0;
    for (int k : set) seconds += IterationSeconds(residents()[k]->job());
    seconds += 2 * kLaunchSeconds;
    const auto that_fit = [seconds](double all) { return static_cast<int64_t>(std::min(1e6, all / seconds)); };
    int64_t iterations = std::max<int64_t>(1, that_fit(slice_seconds()));
    std::vector<int64_t> allowance(residents().size(), 0);
    int64_t most = 0;
    for (int k : set) {
      allowance[k] = residents()[k]->Allowance();
      if (residents()[k]->OnChip()) most = std::max(most, std::min(iterations, allowance[k]));
    }
    MakeExact(set);
    RunOnChip(set, most);
    Set passing;  // Not on the chip alone.
    for (int k : set) {
      TransportResident* r = residents()[k];
      if (!r->IsOnChipAlone()) {
        passing.push_back(k);
        continue;
      }
      r->CountPasses(CeilDiv(most, kOnChipChunk) * kOnChipChunk);
      if (r->passes_left() == 0) r->EndIterations();
    }
    set = passing;
    Passes passes;
    Table accelerated;
    bool changed = true;
    double held_seconds = 0;
    for (int64_t done = 0; done < iterations && !set.empty(); ++done) {
      changed |= KeepAll(set, 0);
      changed |= HoldBeside(&set);
      changed |= LoopApart(&set, 0, iterations - done, false);
      changed |= LoopBeside(&set, 0, iterations - done, false);
      for (int k : Loop(&set, 0, iterations - done, false)) {
        const Job& job = residents()[k]->job();
        residents()[k]->CountLoops(LoopLaunches(job, iterations - done, false), LoopChunk(job));
        if (residents()[k]->passes_left() == 0) residents()[k]->EndIterations();
        changed = true;
      }
      if (set.empty()) break;
      const size_t before = set.size();
      held_seconds += HoldFrames(&set);
      iterations = std::min(iterations, std::max(done + 1, that_fit(slice_seconds() - held_seconds)));
      if (set.empty()) break;
      if (changed || set.size() != before) {
        passes = PassesOf(set);
        accelerated = AcceleratedOf(set);
      }
      RunPass(&passes, Pass::kIterate, done);
      Later(accelerated, [this](const LaunchTable& t, int64_t blocks) { LaunchAnderson(t, blocks, stream()); });
      Set left;
      for (int k : set) {
        TransportResident* r = residents()[k];
        r->CountPasses(1);
        if (r->passes_left() == 0 && !r->MayLag() && !r->LeavesApart()) r->EndIterations();
        if (done + 1 < allowance[k] && r->passes_left() > 0) left.push_back(k);
      }
      changed = left.size() != set.size();
      set = left;
    }
  }

  void Finish(const Set& set) {
    if (set.empty()) return;
    // What has met its tolerance before they were to be kept is measured from them, as in longer slices.
    KeepExponents(Among(set, [](const TransportResident& r) { return r.job().solver.tolerance > 0; }), 0);
    Passes passes = PassesOf(Among(set, [](const TransportResident& r) { return !r.IsMeasured(); }));
    RunPass(&passes, Pass::kMeasure, 0);
    MakeOutputs(set);
  }
};

}  // namespace

absl::Status LaunchSlice(absl::Span<Resident* const> residents, double slice_seconds, LaunchContext* context) {
  return Slice(residents, slice_seconds, context).Run();
}

}  // namespace cuda
}  // namespace sinkhorn
