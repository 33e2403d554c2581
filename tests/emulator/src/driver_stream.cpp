// The fake driver: streams and events.
#include "driver.h"

namespace emulator::fake {

StreamHandle* find_stream(void* handle) {
  constexpr uintptr_t LEGACY = 1, PER_THREAD = 2;
  uintptr_t value = reinterpret_cast<uintptr_t>(handle);
  if (value == 0 || value == LEGACY || value == PER_THREAD) {
    if (!current_context) return nullptr;
    StreamHandle*& s = driver().default_streams[current_context->device];
    if (!s) s = new StreamHandle{&create_stream(current_context->device)};
    return s;
  }
  auto found = driver().streams.find(static_cast<StreamHandle*>(handle));
  return found == driver().streams.end() ? nullptr : *found;
}

static Result wait(Lock& held, const std::function<bool()>& is_done) {
  if (Result error = failure_code()) return error;
  wait_for(held, is_done);
  return failure_code();
}

Result wait_for_stream(Lock& held, StreamHandle& stream) {
  Stream* s = stream.stream;
  return wait(held, [s] { return s->queue.empty(); });
}

Result wait_for_device(Lock& held, int device) {
  return wait(held, [device] {
    for (auto& s : machine().streams) {
      if (s && s->device == device && !s->queue.empty()) return false;
    }
    return true;
  });
}

void submit(StreamHandle& stream, std::function<void(Stream&)> enqueue_on) {
  if (stream.capture) {
    stream.capture->nodes.push_back({std::move(enqueue_on)});
  } else {
    enqueue_on(*stream.stream);
  }
}

}  // namespace emulator::fake

using namespace emulator;
using namespace emulator::fake;

namespace {
Result query(const std::function<bool()>& is_done) {
  if (Result error = failure_code()) return error;
  bool done = poll_for(is_done);
  if (Result error = failure_code()) return error;
  return done ? SUCCESS : NOT_READY;
}
}  // namespace

CUDA_API cuStreamCreate(StreamHandle** stream, unsigned flags) {
  auto held = lock();
  if (!current_context) return INVALID_CONTEXT;
  if (!stream || flags > 1) return INVALID_VALUE;
  *stream = new StreamHandle{&create_stream(current_context->device)};
  driver().streams.insert(*stream);
  return SUCCESS;
}
CUDA_API cuStreamCreateWithPriority(StreamHandle** stream, unsigned flags, int) {
  return cuStreamCreate(stream, flags);
}
CUDA_API cuStreamDestroy_v2(StreamHandle* stream) {
  auto held = lock();
  if (!driver().streams.erase(stream)) return INVALID_HANDLE;
  if (stream->capture) {
    delete stream->capture;
    driver().num_capturing--;
  }
  destroy_stream(*stream->stream);
  delete stream;
  return SUCCESS;
}
CUDA_API cuStreamSynchronize(void* stream) {
  auto held = lock();
  StreamHandle* s = find_stream(stream);
  if (!s) return current_context ? INVALID_HANDLE : INVALID_CONTEXT;
  if (s->capture) {
    s->is_capture_broken = true;
    return STREAM_CAPTURE_UNSUPPORTED;
  }
  return wait_for_stream(held, *s);
}
CUDA_API cuStreamQuery(void* stream) {
  auto held = lock();
  StreamHandle* s = find_stream(stream);
  if (!s) return current_context ? INVALID_HANDLE : INVALID_CONTEXT;
  if (s->capture) {
    s->is_capture_broken = true;
    return STREAM_CAPTURE_UNSUPPORTED;
  }
  return query([s] { return s->stream->queue.empty(); });
}
CUDA_API cuStreamWaitEvent(void* stream, EventHandle* event, unsigned) {
  auto held = lock();
  if (int error = failure_code()) return error;
  StreamHandle* s = find_stream(stream);
  if (!s || !event) return INVALID_HANDLE;
  // Only a straight line of work can be captured: no fork to another stream and back.
  if (s->capture != event->captured_in) return STREAM_CAPTURE_ISOLATION;
  if (s->capture || !event->event->issued) return SUCCESS;
  enqueue(*s->stream, {Operation::WAIT, {}, {}, event->event, event->event->issued});
  return SUCCESS;
}

CUDA_API cuEventCreate(EventHandle** event, unsigned flags) {
  auto held = lock();
  constexpr unsigned DISABLE_TIMING = 2;
  if (!current_context) return INVALID_CONTEXT;
  if (!event) return INVALID_VALUE;
  *event = new EventHandle;
  (*event)->has_timing = !(flags & DISABLE_TIMING);
  return SUCCESS;
}
CUDA_API cuEventDestroy_v2(EventHandle* event) {
  auto held = lock();
  if (!event) return INVALID_HANDLE;
  delete event;
  return SUCCESS;
}
CUDA_API cuEventRecord(EventHandle* event, void* stream) {
  auto held = lock();
  if (int error = failure_code()) return error;
  StreamHandle* s = find_stream(stream);
  if (!s || !event) return INVALID_HANDLE;
  event->captured_in = s->capture;
  if (s->capture) return SUCCESS;
  enqueue(*s->stream, {Operation::RECORD, {}, {}, event->event, ++event->event->issued});
  return SUCCESS;
}
CUDA_API cuEventSynchronize(EventHandle* event) {
  auto held = lock();
  if (!event) return INVALID_HANDLE;
  if (event->captured_in) return STREAM_CAPTURE_UNSUPPORTED;
  auto e = event->event;
  uint64_t wanted = e->issued;
  return wait(held, [e, wanted] { return e->done >= wanted; });
}
CUDA_API cuEventQuery(EventHandle* event) {
  auto held = lock();
  if (!event) return INVALID_HANDLE;
  if (event->captured_in) return STREAM_CAPTURE_UNSUPPORTED;
  return query([event] { return event->event->done >= event->event->issued; });
}
CUDA_API cuEventElapsedTime_v2(float* milliseconds, EventHandle* begin, EventHandle* end) {
  auto held = lock();
  if (!milliseconds) return INVALID_VALUE;
  for (EventHandle* e : {begin, end}) {
    if (!e || !e->has_timing || !e->event->issued) return INVALID_HANDLE;
    if (e->event->done < e->event->issued) return NOT_READY;
  }
  *milliseconds = float(double(end->event->time_ns) - double(begin->event->time_ns)) * 1e-6f;
  return SUCCESS;
}
CUDA_API cuEventElapsedTime(float* milliseconds, EventHandle* begin, EventHandle* end) {
  return cuEventElapsedTime_v2(milliseconds, begin, end);
}
