// Puts the page together.

import { startChat } from "./chat.js";
import { look, lookWithNewKey, startCluster } from "./cluster.js";
import { startSettings } from "./settings.js";

startSettings(lookWithNewKey);
startChat(() => void look());
startCluster();
