// A CPU allocator for torch that counts exactly and can enforce a limit.
//
// Every block carries its size in a header in front of it, so that freeing needs no table. Blocks that were allocated
// before memfit_install() keep the deleter of torch's own allocator: they are neither counted here nor harmed.
// Above the limit it throws c10::OutOfMemoryError, which Python sees as torch.OutOfMemoryError; the text contains the
// words that CUDA's allocator uses, because callers recognise the error by them.

#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/alignment.h>
#include <c10/core/impl/alloc_cpu.h>
#include <c10/util/Exception.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <limits>

namespace {

std::atomic<int64_t> live_bytes{0};
std::atomic<int64_t> peak_bytes{0};
std::atomic<int64_t> limit_bytes{std::numeric_limits<int64_t>::max()};
std::atomic<int64_t> denied_count{0};

// As wide as torch's alignment, so that the block after the header is aligned too.
constexpr size_t kHeaderBytes = c10::gAlignment;
static_assert(kHeaderBytes >= sizeof(int64_t));

void free_block(void* block) {
  if (block == nullptr) {
    return;
  }
  char* header = static_cast<char*>(block) - kHeaderBytes;
  // The profiler sees memory events only if the allocator reports them.
  c10::profiledCPUMemoryReporter().Delete(block);
  live_bytes -= *reinterpret_cast<int64_t*>(header);
  c10::free_cpu(header);
}

void raise_peak(int64_t live) {
  int64_t peak = peak_bytes.load();
  while (live > peak && !peak_bytes.compare_exchange_weak(peak, live)) {
  }
}

// Adds to the live bytes before the block exists, so that threads cannot pass the limit together.
void claim(int64_t bytes) {
  const int64_t live = (live_bytes += bytes);
  const int64_t limit = limit_bytes.load();
  if (live > limit) {
    live_bytes -= bytes;
    ++denied_count;
    TORCH_CHECK_WITH(
        OutOfMemoryError,
        false,
        "CUDA out of memory. Tried to allocate ", bytes, " bytes on a device simulated in CPU memory; ",
        live - bytes, " bytes are live and the limit is ", limit, " bytes.");
  }
  raise_peak(live);
}

struct BudgetAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    const c10::Device cpu(c10::DeviceType::CPU);
    if (bytes == 0) {
      return {nullptr, nullptr, &free_block, cpu};
    }
    const auto size = static_cast<int64_t>(bytes);
    claim(size);
    char* header = nullptr;
    try {
      header = static_cast<char*>(c10::alloc_cpu(bytes + kHeaderBytes));
    } catch (...) {
      live_bytes -= size;
      throw;
    }
    *reinterpret_cast<int64_t*>(header) = size;
    void* block = header + kHeaderBytes;
    c10::profiledCPUMemoryReporter().New(block, bytes);
    return {block, block, &free_block, cpu};
  }

  c10::DeleterFnPtr raw_deleter() const override {
    return &free_block;
  }

  void copy_data(void* destination, const void* source, std::size_t bytes) const override {
    default_copy_data(destination, source, bytes);
  }
};

BudgetAllocator budget_allocator;
bool installed = false;

} // namespace

extern "C" {

// For the rest of the process: blocks outlive any attempt to go back.
void memfit_install() {
  if (!installed) {
    c10::SetCPUAllocator(&budget_allocator, /*priority=*/100);
    installed = true;
  }
}

void memfit_set_limit(int64_t bytes) {
  limit_bytes = bytes;
}

void memfit_clear_limit() {
  limit_bytes = std::numeric_limits<int64_t>::max();
}

int64_t memfit_live_bytes() {
  return live_bytes;
}

int64_t memfit_peak_bytes() {
  return peak_bytes;
}

void memfit_reset_peak() {
  peak_bytes = live_bytes.load();
}

int64_t memfit_denied_count() {
  return denied_count;
}

} // extern "C"
