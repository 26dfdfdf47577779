// A request under way, whichever call carries it. Private to the load generator.
#ifndef SINKHORN_CLIENT_LOADGEN_REQUEST_H_
#define SINKHORN_CLIENT_LOADGEN_REQUEST_H_

#include <cstddef>
#include <cstdint>

#include "absl/status/status.h"
#include "sinkhorn/v1/sinkhorn.pb.h"

namespace sinkhorn::client {

struct LoadRequest {
  size_t entry = 0, payload = 0;  // Of the mix.
  int64_t begin = 0;              // When it was, or in an open loop should have been, sent; LoadClock().
  bool measured = false;
};

// What becomes of requests.
class LoadReceiver {
 public:
  // `end`: LoadClock() when the answer was there. `response`: where `status` is OK.
  virtual void Answered(const LoadRequest& request, int64_t end, const absl::Status& status,
                        const v1::SolveResponse& response) = 0;
  // A stream that was asked to close has ended.
  virtual void Closed() = 0;

 protected:
  ~LoadReceiver() = default;
};

// A tag of a completion queue.
class LoadEvent {
 public:
  virtual void Happen(bool ok) = 0;

 protected:
  ~LoadEvent() = default;
};

// Monotonic, ns.
int64_t LoadClock();

}  // namespace sinkhorn::client

#endif  // SINKHORN_CLIENT_LOADGEN_REQUEST_H_
