// Work in chunks on XLA's own thread pool. Chunks are claimed, by the caller too, so nobody waits for a
// thread that has not started: no deadlock however many calls share the pool. A thread that comes too late
// finds nothing left to claim.

#ifndef SPECJAX_KERNELS_CLAIMED_CHUNKS_H_
#define SPECJAX_KERNELS_CLAIMED_CHUNKS_H_

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>
#include <thread>

#include "xla/ffi/api/ffi.h"

namespace specjax {

// Whether elements of this type may be read from there; nullptr is never read.
template <typename Element>
bool IsAligned(const Element* pointer) {
  return reinterpret_cast<uintptr_t>(pointer) % alignof(Element) == 0;
}

// Runs work(i) for every i below num_chunks and returns when all are done.
template <typename Work>
void ForEachChunk(xla::ffi::ThreadPool& pool, int64_t num_chunks, Work work) {
  struct Job {
    explicit Job(Work work) : work(work) {}
    Work work;
    int64_t num_chunks = 0;
    std::atomic<int64_t> next{0};
    std::atomic<int64_t> finished{0};

    void Run() {
      for (int64_t i; (i = next.fetch_add(1)) < num_chunks;) {
        work(i);
        finished.fetch_add(1, std::memory_order_release);
      }
    }
  };
  auto job = std::make_shared<Job>(work);
  job->num_chunks = num_chunks;
  const int64_t helpers = std::min<int64_t>(pool.num_threads(), num_chunks) - 1;
  for (int64_t i = 0; i < helpers; ++i) pool.Schedule([job] { job->Run(); });
  job->Run();
  while (job->finished.load(std::memory_order_acquire) < num_chunks) std::this_thread::yield();
}

}  // namespace specjax

#endif  // SPECJAX_KERNELS_CLAIMED_CHUNKS_H_
