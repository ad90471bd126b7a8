// Calls an FFI handler as XLA would, but with any pointers, dtypes and shapes: jax hands over only aligned ones.

#include <string>
#include <vector>

#include "xla/ffi/api/c_api.h"

namespace {

std::string message;
std::vector<XLA_FFI_Buffer> buffers;

XLA_FFI_Error* CreateError(XLA_FFI_Error_Create_Args* args) {
  message = args->message;
  return reinterpret_cast<XLA_FFI_Error*>(&message);
}

XLA_FFI_Error* NumThreads(XLA_FFI_ThreadPool_NumThreads_Args* args) {
  *args->num_threads = 1;
  return nullptr;
}

}  // namespace

// `count` buffers, the last of them the result. Returns the error's message, "" if there was none.
extern "C" const char* raw_call(XLA_FFI_Handler* handler, int count, const int* dtypes, void* const* data,
                                const int* ranks, int64_t* const* dims) {
  message.clear();
  buffers.clear();
  for (int i = 0; i < count; ++i)
    buffers.push_back({XLA_FFI_Buffer_STRUCT_SIZE, nullptr, static_cast<XLA_FFI_DataType>(dtypes[i]), data[i],
                       ranks[i], dims[i]});
  std::vector<void*> pointers;
  for (XLA_FFI_Buffer& buffer : buffers) pointers.push_back(&buffer);
  std::vector<XLA_FFI_ArgType> types(count, XLA_FFI_ArgType_BUFFER);
  XLA_FFI_RetType result = XLA_FFI_RetType_BUFFER;

  XLA_FFI_Api api = {};
  api.struct_size = XLA_FFI_Api_STRUCT_SIZE;
  api.XLA_FFI_Error_Create = CreateError;
  api.XLA_FFI_ThreadPool_NumThreads = NumThreads;
  XLA_FFI_CallFrame frame = {};
  frame.struct_size = XLA_FFI_CallFrame_STRUCT_SIZE;
  frame.api = &api;
  frame.stage = XLA_FFI_ExecutionStage_EXECUTE;
  frame.args = {XLA_FFI_Args_STRUCT_SIZE, nullptr, count - 1, types.data(), pointers.data()};
  frame.rets = {XLA_FFI_Rets_STRUCT_SIZE, nullptr, 1, &result, &pointers[count - 1]};
  frame.attrs.struct_size = XLA_FFI_Attrs_STRUCT_SIZE;
  handler(&frame);
  return message.c_str();
}
