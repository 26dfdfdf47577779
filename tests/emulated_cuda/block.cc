#include "tests/emulated_cuda/block.h"

#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <vector>

sinkhorn::emulated_cuda::Index threadIdx, blockIdx, blockDim, gridDim;

namespace sinkhorn {
namespace emulated_cuda {
namespace {

constexpr unsigned kMostThreads = 1024;
constexpr size_t kStackBytes = 320 << 10;
// Stacks begin at different lines of the caches' sets, or each switch misses them all.
constexpr size_t kColours = 64, kColourBytes = 17 * 64;
constexpr int kNames = 16;        // Of barriers.
constexpr size_t kBeyond = 4096;  // Behind a block's dynamic shared memory: nobody may write there.

[[noreturn]] void Fail(const char* what) {
  std::fprintf(stderr, "emulated kernel, block %u, thread %u: %s\n", blockIdx.x, threadIdx.x, what);
  std::abort();
}

// A coroutine: in the middle of a kernel, or at its end and ready for the next.
struct Thread {
  char* stack = nullptr;
  void* place = nullptr;  // Its stack pointer while it does not run; null: it is yet to begin.
};

// Goes on at `to`, a stack pointer that this function left in its *place or that BeginningOf made. The C library's
// setjmp and longjmp would do, and take most of the time of a kernel whose lanes exchange numbers.
extern "C" void SinkhornSwitch(void** place, void* to);
asm(R"(
.text
.globl SinkhornSwitch
.type SinkhornSwitch, @function
SinkhornSwitch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size SinkhornSwitch, .-SinkhornSwitch
)");

// Lanes that meet.
struct Meeting {
  unsigned mask, arrived;
  void (*complete)();
  MeetingEnd end;
  void* requests[32];
};

// Lanes as bits.
struct Warp {
  unsigned there = 0;  // Not ended.
  unsigned ready = 0;  // May run.
  int meeting_count = 0;
  Meeting meetings[32];
};

struct Barrier {
  int arrived = 0, counted = 0, result = 0, line = 0;
  std::vector<unsigned> waiting;
};

class Machine {
 public:
  void RunGrid(Index grid, unsigned threads, size_t shared_bytes, const std::function<void()>& kernel) {
    if (threads == 0 || threads > kMostThreads || shared_bytes > kMostSharedBytes) Fail("no block may be so large");
    const std::lock_guard<std::mutex> lock(mutex_);
    kernel_ = &kernel;
    count_ = threads;
    gridDim = grid;
    blockDim = {threads, 1, 1};
    for (unsigned z = 0; z < grid.z; ++z) {
      for (unsigned y = 0; y < grid.y; ++y) {
        for (unsigned x = 0; x < grid.x && !lost_; ++x) {
          blockIdx = {x, y, z};
          std::memset(shared_, 0xff, shared_bytes + kBeyond);  // Not a number, as far as nobody has written.
          RunBlock();
          const char* const end = shared_ + shared_bytes;
          const bool untouched = *end == '\xff' && std::memcmp(end, end + 1, kBeyond - 1) == 0;
          if (!untouched) Fail("written behind the block's shared memory");
        }
      }
    }
  }

  char* shared() { return shared_; }
  bool lost() const { return lost_; }

  void Meet(unsigned mask, void* request, void (*complete)(), MeetingEnd end) {
    const unsigned lane = running_ % 32, bit = 1u << lane;
    if (!(mask & bit)) Fail("a lane meets others without naming itself");
    Warp& warp = warps_[running_ / 32];
    int index = 0;
    while (index < warp.meeting_count && warp.meetings[index].mask != mask) ++index;
    Meeting& meeting = warp.meetings[index];
    if (index == warp.meeting_count) {
      ++warp.meeting_count;
      meeting.mask = mask;
      meeting.arrived = 0;
      meeting.complete = complete;
      meeting.end = end;
    }
    if (meeting.complete != complete) Fail("lanes of a warp meet for different things");
    meeting.arrived |= bit;
    meeting.requests[lane] = request;
    if (!EndMeeting(&warp, index)) return Leave();
    warp.ready &= ~bit;  // It runs on.
  }

  int Sync(int name, int threads, bool counted, int line) {
    Barrier& barrier = barriers_[name];
    // On a GPU those that have gone different ways wait for ever, or lose the device.
    if (barrier.arrived > 0 && barrier.line != line) Fail("threads of a block wait at different places");
    barrier.line = line;
    ++barrier.arrived;
    barrier.counted += counted;
    if (barrier.arrived < (name == 0 ? static_cast<int>(count_) - ended_ : threads)) {
      barrier.waiting.push_back(running_);
      Leave();
    } else {
      Release(&barrier);
    }
    return barrier.result;
  }

  [[noreturn]] void Lose() {
    lost_ = true;
    void* nowhere;
    SinkhornSwitch(&nowhere, launcher_);
    Fail("a thread that was left for good runs");
  }

 private:
  void RunBlock() {
    ended_ = 0;
    for (Barrier& barrier : barriers_) barrier.arrived = barrier.counted = 0, barrier.waiting.clear();
    for (unsigned w = 0; w < Warps(); ++w) {
      warps_[w].there = warps_[w].ready = w < count_ / 32 ? ~0u : (1u << count_ % 32) - 1;
      warps_[w].meeting_count = 0;
    }
    for (unsigned t = 0; t < count_; ++t) {
      if (threads_[t].place == nullptr) threads_[t].place = BeginningOf(&threads_[t]);
    }
    running_ = 0;
    SinkhornSwitch(&launcher_, threads_[Next()].place);
    if (!lost_) return;
    for (Thread& thread : threads_) thread.place = nullptr;  // Most are in the middle of a kernel.
  }
  unsigned Warps() const { return (count_ + 31) / 32; }

  // Makes the next thread that can run the running one: of the warp at work, or now and then of another; its first lane
  // or its last. So what lacks a barrier is likely to show.
  unsigned Next() {
    random_ ^= random_ << 13, random_ ^= random_ >> 17, random_ ^= random_ << 5;
    const unsigned first = random_ % 8 == 0 ? random_ / 8 % Warps() : running_ / 32;
    for (unsigned k = 0, w = first; k < Warps(); ++k, w = w + 1 == Warps() ? 0 : w + 1) {
      const unsigned ready = warps_[w].ready;
      if (ready == 0) continue;
      const int lane = random_ >> 31 != 0 ? __builtin_ctz(ready) : 31 - __builtin_clz(ready);
      warps_[w].ready &= ~(1u << lane);
      running_ = 32 * w + static_cast<unsigned>(lane);
      threadIdx = {running_, 0, 0};
      return running_;
    }
    Fail("all threads wait for each other");
  }

  void* BeginningOf(Thread* thread) {
    if (thread->stack == nullptr) {
      void* const memory = mmap(nullptr, kStackBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
      if (memory == MAP_FAILED || mprotect(memory, 4096, PROT_NONE) != 0) Fail("no memory for a stack");
      thread->stack = static_cast<char*>(memory);
    }
    // Six registers, where to go, and where that would return to.
    const size_t colour = static_cast<size_t>(thread - threads_) % kColours;
    void** const top = reinterpret_cast<void**>(thread->stack + kStackBytes - colour * kColourBytes);
    top[-1] = nullptr;
    top[-2] = reinterpret_cast<void*>(&Machine::Coroutine);
    std::fill(top - 8, top - 2, nullptr);
    return top - 8;
  }
  static void Coroutine();
  void Live() {
    while (true) {
      (*kernel_)();
      End();
      Leave();
    }
  }
  // Until another thread has made this one ready, or it is wanted for the next block.
  void Leave() {
    Thread& thread = threads_[running_];
    void* const to = ended_ == static_cast<int>(count_) ? launcher_ : threads_[Next()].place;
    SinkhornSwitch(&thread.place, to);
  }

  // The running thread ends: it is waited for no longer.
  void End() {
    ++ended_;
    Barrier& barrier = barriers_[0];
    if (barrier.arrived > 0 && barrier.arrived >= static_cast<int>(count_) - ended_) Release(&barrier);
    Warp& warp = warps_[running_ / 32];
    warp.there &= ~(1u << running_ % 32);
    for (int k = warp.meeting_count; k-- > 0;) EndMeeting(&warp, k);
  }
  void Release(Barrier* barrier) {
    barrier->result = barrier->counted;
    barrier->arrived = barrier->counted = 0;
    for (unsigned t : barrier->waiting) warps_[t / 32].ready |= 1u << t % 32;
    barrier->waiting.clear();
  }
  // If all who are there have come.
  bool EndMeeting(Warp* warp, int index) {
    Meeting& meeting = warp->meetings[index];
    if ((meeting.mask & warp->there & ~meeting.arrived) != 0) return false;
    meeting.end(meeting.complete, meeting.requests, meeting.arrived);
    warp->ready |= meeting.arrived;
    --warp->meeting_count;
    if (index != warp->meeting_count) meeting = warp->meetings[warp->meeting_count];
    return true;
  }

  alignas(1024) static char shared_[kMostSharedBytes + kBeyond];
  std::mutex mutex_;
  std::atomic<bool> lost_{false};
  const std::function<void()>* kernel_ = nullptr;
  unsigned count_ = 0, running_ = 0;
  uint32_t random_ = 2463534242;  // For Next.
  int ended_ = 0;
  void* launcher_ = nullptr;  // Where the thread that launched goes on.
  Thread threads_[kMostThreads];
  Warp warps_[kMostThreads / 32];
  Barrier barriers_[kNames];
};

alignas(1024) char Machine::shared_[kMostSharedBytes + kBeyond];

Machine& TheMachine() {
  static auto* machine = new Machine;
  return *machine;
}

void Machine::Coroutine() { TheMachine().Live(); }

}  // namespace

void RunGrid(Index grid, unsigned threads, size_t shared_bytes, const std::function<void()>& kernel) {
  TheMachine().RunGrid(grid, threads, shared_bytes, kernel);
}
char* SharedMemory() { return TheMachine().shared(); }
int SyncBlock(bool counted, int line) { return TheMachine().Sync(0, 0, counted, line); }
void SyncNamed(int name, int threads) {
  if (name < 1 || name >= kNames) Fail("no barrier has such a number");
  TheMachine().Sync(name, threads, false, 0);
}
void LoseDevice() { TheMachine().Lose(); }
bool DeviceIsLost() { return TheMachine().lost(); }
void Meet(unsigned mask, void* request, void (*complete)(), MeetingEnd end) {
  TheMachine().Meet(mask, request, complete, end);
}

}  // namespace emulated_cuda
}  // namespace sinkhorn
