// The C++ client: a thin typed layer over the generated messages.
//
//   auto client = *Client::Create("localhost:8001");
//   v1::SolveRequest request = DenseRequest(MakeTensor(cost, {n, m}), /*epsilon=*/0.1);
//   absl::StatusOr<v1::SolveResponse> response = client->Solve(request, absl::Now() + absl::Seconds(5));
//
// Deadlines are required, because the deadline is a call's only timeout; absl::InfiniteFuture() is one. Errors keep the
// server's code and message, and errors.h decodes their details. All methods may be called from any thread at once.
#ifndef SINKHORN_CLIENT_CPP_CLIENT_H_
#define SINKHORN_CLIENT_CPP_CLIENT_H_

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "client/cpp/channel.h"
#include "client/cpp/errors.h"    // IWYU pragma: export
#include "client/cpp/requests.h"  // IWYU pragma: export
#include "client/cpp/tensor.h"    // IWYU pragma: export
#include "grpc/health/v1/health.grpc.pb.h"
#include "grpcpp/generic/generic_stub.h"
#include "sinkhorn/v1/sinkhorn.grpc.pb.h"

namespace sinkhorn::client {

// The name under which the server answers health checks for solves; "liveness" is the process's own.
inline constexpr char kServiceName[] = "sinkhorn.v1.SinkhornService";

// A call that is under way. May be dropped: the call goes on.
class Call {
 public:
  virtual ~Call() = default;
  // Asks the call to end soon: it ends with CANCELLED unless it is done already.
  virtual void Cancel() = 0;
};

// A stream of problems. One thread may write while another reads; the order of replies is that of completion.
class SolveStream {
 public:
  struct Reply {
    std::string request_id;
    absl::StatusOr<v1::SolveResponse> result;
  };

  virtual ~SolveStream() = default;  // Cancels what is unfinished.
  // Sends a problem; blocks while the server is behind. False: the stream is broken, see Finish.
  virtual bool Write(v1::SolveRequest request) = 0;
  // Says that no more problems come.
  virtual void WritesDone() = 0;
  // Takes the next reply; blocks until there is one. False: there are no more, see Finish. An error in `result` is that
  // problem's alone.
  virtual bool Read(Reply* reply) = 0;
  // The stream's own status, once Read has returned false.
  virtual absl::Status Finish() = 0;
  virtual void Cancel() = 0;
};

class Client {
 public:
  using Callback = std::function<void(absl::StatusOr<v1::SolveResponse>)>;

  // Makes a client of `target` (channel.h says what it may be). Connects at the first call.
  static absl::StatusOr<std::unique_ptr<Client>> Create(const std::string& target, const ClientOptions& options = {});
  // Of a channel made elsewhere; of `options`, only wait_for_ready and auth_token count.
  explicit Client(std::shared_ptr<grpc::Channel> channel, const ClientOptions& options = {});
  // Waits until the callbacks of all asynchronous calls have returned: Cancel those that may take long. Must not run in
  // one.
  ~Client();

  // Solves one request and waits for it. Moved into the call, a request is sent without a copy of its tensors.
  absl::StatusOr<v1::SolveResponse> Solve(const v1::SolveRequest& request, absl::Time deadline);
  absl::StatusOr<v1::SolveResponse> Solve(v1::SolveRequest&& request, absl::Time deadline);

  // Starts one and returns; `request` is free by then. `done` runs exactly once, on a thread of gRPC's: it must not
  // block, and may start the next.
  std::shared_ptr<Call> SolveAsync(const v1::SolveRequest& request, absl::Time deadline, Callback done);
  std::shared_ptr<Call> SolveAsync(v1::SolveRequest&& request, absl::Time deadline, Callback done);

  // Solves all, at most `max_in_flight` at a time, and waits for them. Result i belongs to request i; one that fails
  // leaves the others alone.
  std::vector<absl::StatusOr<v1::SolveResponse>> SolveAll(absl::Span<const v1::SolveRequest> requests,
                                                          absl::Time deadline, int max_in_flight = 64);

  // Opens a stream; `deadline` holds for all of it.
  std::unique_ptr<SolveStream> OpenStream(absl::Time deadline);

  absl::StatusOr<v1::GetServerInfoResponse> GetServerInfo(absl::Time deadline);

  // Whether the server takes solves now. NOT_FOUND: it does not know `service`.
  absl::StatusOr<bool> CheckHealth(absl::Time deadline, absl::string_view service = kServiceName);

  // Returns once the server takes solves; connects, and asks again while it starts or is not there yet. On error (the
  // deadline has passed, or the server has no health service) the message says what was seen last.
  absl::Status WaitForReady(absl::Time deadline);

 private:
  class CallCount;
  class AsyncCall;

  void Prepare(absl::Time deadline, bool wait_for_ready, grpc::ClientContext* context) const;

  const std::shared_ptr<grpc::Channel> channel_;
  const std::unique_ptr<v1::SinkhornService::Stub> stub_;
  const std::unique_ptr<grpc::TemplatedGenericStub<grpc::ByteBuffer, v1::SolveResponse>> encoded_stub_;
  const std::unique_ptr<grpc::health::v1::Health::Stub> health_;
  const std::shared_ptr<CallCount> calls_;
  const bool wait_for_ready_;
  const std::string authorization_;
};

}  // namespace sinkhorn::client

#endif  // SINKHORN_CLIENT_CPP_CLIENT_H_
