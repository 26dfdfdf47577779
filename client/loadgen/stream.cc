// Of a stream's events a read is always under way, from its start to its end; at most one write is beside it. It is
// over when its status is there and no write is left.
#include "client/loadgen/stream.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "client/cpp/errors.h"
#include "google/protobuf/io/coded_stream.h"
#include "google/protobuf/wire_format_lite.h"

namespace sinkhorn::client {
namespace {

constexpr char kSolveStreamMethod[] = "/sinkhorn.v1.SinkhornService/SolveStream";

// The head of a field that has a length: its tag and `size`.
std::string FieldHead(int field, size_t size) {
  using google::protobuf::internal::WireFormatLite;
  using google::protobuf::io::CodedOutputStream;
  uint8_t head[20];
  uint8_t* end = CodedOutputStream::WriteTagToArray(
      WireFormatLite::MakeTag(field, WireFormatLite::WIRETYPE_LENGTH_DELIMITED), head);
  end = CodedOutputStream::WriteVarint64ToArray(size, end);
  return std::string(head, end);
}

// A SolveStreamRequest around `solve`, whose bytes are not copied, and `id` at its end.
grpc::ByteBuffer StreamRequest(const grpc::Slice& solve, const std::string& id) {
  const std::string tail = FieldHead(v1::SolveRequest::kRequestIdFieldNumber, id.size()) + id;
  const std::string head = FieldHead(v1::SolveStreamRequest::kSolveFieldNumber, solve.size() + tail.size());
  const grpc::Slice slices[] = {grpc::Slice(head), solve, grpc::Slice(tail)};
  return grpc::ByteBuffer(slices, 3);
}

}  // namespace

LoadStream::LoadStream(grpc::GenericStub* stub, grpc::CompletionQueue* queue, const LoadStreamOptions& options,
                       LoadReceiver* receiver)
    : stub_(stub), queue_(queue), options_(options), receiver_(receiver) {}

void LoadStream::Send(const grpc::Slice& solve, const LoadRequest& request) {
  absl::MutexLock lock(&mutex_);
  if (call_ == nullptr) Open();
  std::string id = absl::StrCat(++last_id_);
  unsent_.push_back(StreamRequest(solve, id));
  under_way_.emplace(std::move(id), request);
  WriteNext();
}

void LoadStream::Close() {
  {
    absl::MutexLock lock(&mutex_);
    closing_ = true;
    if (call_ != nullptr) return WriteNext();
  }
  receiver_->Closed();
}

void LoadStream::Open() {
  call_ = std::make_unique<Call>();
  call_->context.set_deadline(options_.deadline);
  if (!options_.authorization.empty()) call_->context.AddMetadata("authorization", options_.authorization);
  call_->rpc = stub_->PrepareCall(&call_->context, kSolveStreamMethod, queue_);
  call_->rpc->StartCall(&started_);
}

void LoadStream::WriteNext() {
  if (!call_->started || call_->writing || call_->broken || call_->half_closed) return;
  if (!unsent_.empty()) {
    call_->writing = true;
    const grpc::ByteBuffer message = std::move(unsent_.front());
    unsent_.pop_front();
    grpc::WriteOptions options;
    if (!unsent_.empty()) options.set_buffer_hint();  // To leave with the next, by one call of the system's.
    call_->rpc->Write(message, options, &written_);
  } else if (closing_ && under_way_.empty()) {
    call_->writing = call_->half_closed = true;
    call_->rpc->WritesDone(&written_);
  }
}

void LoadStream::Finish() {
  call_->broken = true;
  call_->rpc->Finish(&call_->status, &finished_);
}

void LoadStream::OnStarted(bool ok) {
  absl::MutexLock lock(&mutex_);
  if (!ok) return Finish();
  call_->started = true;
  call_->rpc->Read(&call_->reply, &read_);
  WriteNext();
}

void LoadStream::OnWritten(bool ok) {
  {
    absl::MutexLock lock(&mutex_);
    call_->writing = false;
    if (!ok) call_->broken = true;  // The read tells.
    WriteNext();
  }
  EndIfOver();
}

void LoadStream::OnRead(bool ok) {
  const int64_t end = LoadClock();
  grpc::ByteBuffer reply;
  {
    absl::MutexLock lock(&mutex_);
    if (!ok) return Finish();
    reply.Swap(&call_->reply);
    call_->rpc->Read(&call_->reply, &read_);
  }
  std::string id;
  v1::SolveResponse response;
  const absl::Status status = ReadStreamReply(&reply, options_.part, &id, &response);
  LoadRequest request;
  {
    absl::MutexLock lock(&mutex_);
    const auto found = under_way_.find(id);
    // An answer to nothing that was asked: what was asked stays unanswered, and is counted when the stream ends.
    if (found == under_way_.end()) return;
    request = found->second;
    under_way_.erase(found);
  }
  receiver_->Answered(request, end, status, response);
}

void LoadStream::OnFinished(bool) {
  {
    absl::MutexLock lock(&mutex_);
    call_->finished = true;
  }
  EndIfOver();
}

void LoadStream::EndIfOver() {
  const int64_t end = LoadClock();
  std::unique_ptr<Call> call;
  std::unordered_map<std::string, LoadRequest> unanswered;
  bool closed;
  {
    absl::MutexLock lock(&mutex_);
    if (!call_->finished || call_->writing) return;
    call = std::move(call_);
    unanswered.swap(under_way_);
    unsent_.clear();
    closed = closing_;
  }
  absl::Status status = FromGrpcStatus(call->status);
  if (status.ok()) status = absl::InternalError("the stream ended without an answer");
  for (const auto& [id, request] : unanswered) receiver_->Answered(request, end, status, {});
  if (closed) receiver_->Closed();
}

}  // namespace sinkhorn::client
