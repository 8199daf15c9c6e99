// The commands of layerctl for the layers that live on a server: layers list, describe, upload, quantize, download, delete,
// verify.
#ifndef LAYERD_CLIENT_LAYERS_H_
#define LAYERD_CLIENT_LAYERS_H_

#include "client/commands.h"

namespace layerd {

// Each adds its command to `layers`, and what it does to `actions`.
void RegisterLayersList(CLI::App& layers, Actions& actions);
void RegisterLayersDescribe(CLI::App& layers, Actions& actions);
void RegisterLayersUpload(CLI::App& layers, Actions& actions);
void RegisterLayersQuantize(CLI::App& layers, Actions& actions);
void RegisterLayersDownload(CLI::App& layers, Actions& actions);
void RegisterLayersDelete(CLI::App& layers, Actions& actions);
void RegisterLayersVerify(CLI::App& layers, Actions& actions);

}  // namespace layerd

#endif  // LAYERD_CLIENT_LAYERS_H_
