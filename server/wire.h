// Between wire bytes and messages, without copying a tensor.
//
// A request's tensors stay where the transport put them: decoding parses a copy of the message in which each tensor's
// `data` is replaced by a reference into the original bytes. A reply's tensors are sent from where the backend wrote
// them: encoding yields a list of pieces, alternately a few header bytes and a tensor's memory. Free of gRPC.
#ifndef SINKHORN_SERVER_WIRE_H_
#define SINKHORN_SERVER_WIRE_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/strings/string_view.h"
#include "absl/types/optional.h"
#include "absl/types/span.h"
#include "google/protobuf/message.h"
#include "sinkhorn/v1/sinkhorn.pb.h"

namespace sinkhorn {

// Parses `bytes` into `message` (a SolveRequest or SolveStreamRequest). Its tensors' `data` then are references: read
// them with TensorData(bytes, tensor), while `bytes` lives. False: not a message of that type.
bool DecodeWithoutTensors(absl::string_view bytes, google::protobuf::Message* message);

// The data of a tensor of a message that was decoded from `bytes`.
absl::string_view TensorData(absl::string_view bytes, const v1::Tensor& tensor);

// A tensor of the reply: memory of the caller.
struct ReplyTensor {
  int field = 0;  // Number in SolveResponse.
  v1::DataType dtype = v1::DATA_TYPE_UNSPECIFIED;
  std::vector<int64_t> shape;
  size_t offset = 0;  // In the reply's memory block.
  size_t bytes = 0;
};

// A stretch of an encoded message: header bytes, then bytes of a tensor (may be empty).
struct WirePiece {
  std::string head;
  const ReplyTensor* tensor = nullptr;
};

// The wire form of `response` with `tensors` added to it: a SolveResponse, or, with `stream_request_id`, the
// SolveStreamResponse around it.
std::vector<WirePiece> EncodeResponse(const v1::SolveResponse& response, absl::Span<const ReplyTensor> tensors,
                                      absl::optional<absl::string_view> stream_request_id);

// Most bytes that the message around the tensors' data takes, per tensor.
constexpr int64_t kTensorHeaderBytesMax = 512;

}  // namespace sinkhorn

#endif  // SINKHORN_SERVER_WIRE_H_
