#include "client/loadgen/reply.h"

#include "client/cpp/errors.h"
#include "google/protobuf/io/coded_stream.h"
#include "google/protobuf/wire_format_lite.h"
#include "google/rpc/status.pb.h"
#include "grpcpp/support/proto_buffer_reader.h"

namespace sinkhorn::client {
namespace {

using google::protobuf::internal::WireFormatLite;
using google::protobuf::io::CodedInputStream;

// Reads a message that lies inside another by `read`, which gets to see its bytes alone.
template <class Read>
bool ReadInside(CodedInputStream* in, Read read) {
  int size = 0;
  if (!in->ReadVarintSizeAsInt(&size)) return false;
  const auto limit = in->PushLimit(size);
  if (!read() || !in->ConsumedEntireMessage()) return false;
  in->PopLimit(limit);
  return true;
}

bool ReadChild(CodedInputStream* in, google::protobuf::Message* message) {
  return ReadInside(in, [&] { return message->MergeFromCodedStream(in); });
}

bool ReadSummary(CodedInputStream* in, v1::SolveResponse* response) {
  while (const uint32_t tag = in->ReadTag()) {
    const int field = WireFormatLite::GetTagFieldNumber(tag);
    if (field == v1::SolveResponse::kConvergenceFieldNumber) {
      if (!ReadChild(in, response->mutable_convergence())) return false;
    } else if (field == v1::SolveResponse::kExecutionFieldNumber) {
      if (!ReadChild(in, response->mutable_execution())) return false;
    } else if (!WireFormatLite::SkipField(in, tag)) {
      return false;
    }
  }
  return true;
}

bool ReadResponse(CodedInputStream* in, ReplyPart part, v1::SolveResponse* response) {
  return part == ReplyPart::kAll ? response->MergeFromCodedStream(in) : ReadSummary(in, response);
}

absl::Status Undecodable() { return absl::InternalError("the reply cannot be decoded"); }

}  // namespace

absl::Status ReadReply(grpc::ByteBuffer* reply, ReplyPart part, v1::SolveResponse* response) {
  grpc::ProtoBufferReader reader(reply);
  CodedInputStream in(&reader);
  return ReadResponse(&in, part, response) && in.ConsumedEntireMessage() ? absl::OkStatus() : Undecodable();
}

absl::Status ReadStreamReply(grpc::ByteBuffer* reply, ReplyPart part, std::string* request_id,
                             v1::SolveResponse* response) {
  grpc::ProtoBufferReader reader(reply);
  CodedInputStream in(&reader);
  google::rpc::Status error;
  bool has_answer = false, has_error = false;
  while (const uint32_t tag = in.ReadTag()) {
    bool read = false;
    switch (WireFormatLite::GetTagFieldNumber(tag)) {
      case v1::SolveStreamResponse::kRequestIdFieldNumber:
        read = WireFormatLite::ReadString(&in, request_id);
        break;
      case v1::SolveStreamResponse::kSolveFieldNumber:
        read = has_answer = ReadInside(&in, [&] { return ReadResponse(&in, part, response); });
        break;
      case v1::SolveStreamResponse::kErrorFieldNumber:
        read = has_error = ReadChild(&in, &error);
        break;
      default:
        read = WireFormatLite::SkipField(&in, tag);
    }
    if (!read) return Undecodable();
  }
  if (!in.ConsumedEntireMessage()) return Undecodable();
  if (has_error) return FromRpcStatus(error);
  return has_answer ? absl::OkStatus() : absl::InternalError("the reply has neither answer nor error");
}

}  // namespace sinkhorn::client
