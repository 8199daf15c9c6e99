// The HTTP/2 settings of both ends, server and client.
//
// gRPC left to itself changes its window with each estimate of the connection's bandwidth and with the pressure on its
// memory. Version 1.51 has been seen to refuse a frame in the middle of a large upload that way (RST_STREAM with
// PROTOCOL_ERROR, which clients see as INTERNAL). So the window stands still; for a message that is awaited gRPC opens it
// further.
#ifndef LAYERD_WIRE_HTTP2_SETTINGS_H_
#define LAYERD_WIRE_HTTP2_SETTINGS_H_

namespace layerd {

inline constexpr int kHttp2WindowBytes = 4 << 20;  // of a stream, before its message is awaited
inline constexpr int kHttp2FrameBytes = 1 << 20;   // the default of 16 KiB costs large messages much of their speed

}  // namespace layerd

#endif  // LAYERD_WIRE_HTTP2_SETTINGS_H_
