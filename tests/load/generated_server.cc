// What a server of generated code does with large messages, at its best: parses the request, moves its tensor into the
// reply without solving anything, and lets gRPC write that. payload.py puts it beside the real one.
//
//   generated_server PORT_FILE
#include <grpcpp/grpcpp.h>
#include <grpcpp/health_check_service_interface.h>

#include <cstdio>
#include <fstream>
#include <memory>
#include <string>

#include "sinkhorn/v1/sinkhorn.grpc.pb.h"

namespace v1 = sinkhorn::v1;

class Echo final : public v1::SinkhornService::CallbackService {
  grpc::ServerUnaryReactor* Solve(grpc::CallbackServerContext* context, const v1::SolveRequest* request,
                                  v1::SolveResponse* reply) override {
    bool plan = request->outputs_size() == 0;
    for (int output : request->outputs()) plan |= output == v1::OUTPUT_PLAN;
    // The request is gone after this.
    if (plan)
      reply->mutable_plan()->Swap(const_cast<v1::SolveRequest*>(request)->mutable_normalization()->mutable_logits());
    reply->mutable_convergence()->set_iterations(1);
    grpc::ServerUnaryReactor* reactor = context->DefaultReactor();
    reactor->Finish(grpc::Status::OK);
    return reactor;
  }
};

int main(int argc, char** argv) {
  if (argc != 2) return 2;
  grpc::EnableDefaultHealthCheckService(true);
  Echo service;
  grpc::ServerBuilder builder;
  int port = 0;
  builder.AddListeningPort("127.0.0.1:0", grpc::InsecureServerCredentials(), &port);
  builder.SetMaxReceiveMessageSize(-1);
  builder.RegisterService(&service);
  const std::unique_ptr<grpc::Server> server = builder.BuildAndStart();
  if (server == nullptr) return 1;
  server->GetHealthCheckService()->SetServingStatus("sinkhorn.v1.SinkhornService", true);
  const std::string draft = std::string(argv[1]) + ".tmp";
  std::ofstream(draft) << port << "\n0\n";
  if (std::rename(draft.c_str(), argv[1]) != 0) return 1;
  server->Wait();
}
