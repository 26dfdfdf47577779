// protobuf writes long `bytes` fields through WriteAliasedRaw, if the stream offers it; the rest goes into small
// blocks.
#include "client/cpp/encode.h"

#include <algorithm>
#include <memory>
#include <utility>
#include <vector>

#include "google/protobuf/io/coded_stream.h"
#include "google/protobuf/io/zero_copy_stream.h"
#include "grpcpp/support/slice.h"

namespace sinkhorn::client {
namespace {

// A field that fits the rest of a block is copied into it; a longer one is referred to.
constexpr size_t kBlockBytes = 4096;

class SliceStream : public google::protobuf::io::ZeroCopyOutputStream {
 public:
  explicit SliceStream(std::shared_ptr<const v1::SolveRequest> owner) : owner_(std::move(owner)) {}

  bool Next(void** data, int* size) override {
    CloseBlock();
    block_.resize(kBlockBytes);
    *data = block_.data();
    *size = static_cast<int>(block_.size());
    count_ += *size;
    return true;
  }

  void BackUp(int count) override {
    block_.resize(block_.size() - static_cast<size_t>(count));
    count_ -= count;
  }

  bool AllowsAliasing() const override { return true; }

  bool WriteAliasedRaw(const void* data, int size) override {
    CloseBlock();
    slices_.emplace_back(
        const_cast<void*>(data), static_cast<size_t>(size),
        [](void* owner) { delete static_cast<std::shared_ptr<const v1::SolveRequest>*>(owner); },
        new std::shared_ptr<const v1::SolveRequest>(owner_));
    count_ += size;
    return true;
  }

  int64_t ByteCount() const override { return count_; }

  grpc::ByteBuffer Finish() {
    CloseBlock();
    return grpc::ByteBuffer(slices_.data(), slices_.size());
  }

 private:
  void CloseBlock() {
    if (!block_.empty()) slices_.emplace_back(block_.data(), block_.size());  // Copies.
    block_.clear();
  }

  const std::shared_ptr<const v1::SolveRequest> owner_;
  std::vector<grpc::Slice> slices_;
  std::vector<char> block_;
  int64_t count_ = 0;
};

}  // namespace

grpc::ByteBuffer EncodeInPlace(v1::SolveRequest request) {
  const auto owner = std::make_shared<const v1::SolveRequest>(std::move(request));
  SliceStream stream(owner);
  {
    google::protobuf::io::CodedOutputStream out(&stream);
    out.EnableAliasing(true);
    owner->SerializeToCodedStream(&out);
  }
  return stream.Finish();
}

}  // namespace sinkhorn::client
